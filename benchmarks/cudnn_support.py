"""Asks cuDNN, without a GPU, for the attention of every published row: writes
`docs/reference/support.md`.

XLA asks the installed cuDNN while it compiles for an absent GPU (`jaxbench.plan.ask_cudnn`), and a
call that cuDNN refuses fails to compile.

    python benchmarks/cudnn_support.py [--write]
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tables import table  # noqa: E402

from jaxbench.base import hardware  # noqa: E402
from jaxbench.plan import ask_cudnn, stubs  # noqa: E402
from jaxbench.recipe import recipes  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "support.md"

GPUS = "h100", "b200", "gb200", "gb300"

REFUSED = (192, 192), (192, 96), (160, 128), (256, 256)
"""Head dims of keys and of values for which the page asks with a single call."""

TEXT = """# Attention that cuDNN computes

`python benchmarks/cudnn_support.py --write` made this page.
It asks the real cuDNN ({version}), through XLA, without a GPU.

## Published rows

For every model and GPU the largest attention of its rows, as one device computes it.
`yes` is for the forward and the backward pass, with the workspace of each backward call.
Heads are those of queries / of keys and values, features those of queries and keys / of values.
Where values are computed in two parts, there are two calls
([attention](../design/attention.md#head-dims-that-cudnn-refuses)).

{published}
## Head dims in one call

{head_dims}"""


@dataclass(frozen=True, order=True)
class Shape:
    """The attention of one device."""

    sequences: int
    length: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    sinks: bool = False

    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.sequences} x {self.length}",
            f"{self.heads} / {self.kv_heads}",
            f"{self.key_dim} / {self.value_dim}",
            f"{self.window or ''}{', sinks' if self.sinks else ''}".removeprefix(", "),
        )


def shapes(gpu: hardware.Gpu) -> dict[str, set[Shape]]:
    """By model the largest attention of its rows on a GPU, one for each window."""
    found: dict[str, set[Shape]] = {}
    for recipe in recipes.load_all():
        if not gpu.multiplies(recipe.name.rpartition("_")[2]):
            continue
        on = recipe.on(gpu)
        for row in on.rows:
            if row == recipes.SMOKE:
                continue
            run = recipes.resolve(on, row, devices=int(row))
            mixer, split = run.model.attention_mixer, run.parallelism
            if mixer is None:
                continue
            ranks = split.tensor * split.context
            kv_heads = getattr(mixer, "kv_heads", mixer.heads)
            sizes = mixer.heads // ranks, max(kv_heads // ranks, 1), *mixer.score_widths
            for window in {0, mixer.window or 0}:
                sinks = getattr(mixer, "sinks", False)
                shape = Shape(run.microbatch, run.batch.sequence_length, *sizes, window, sinks)
                found.setdefault(recipe.name.rpartition("_")[0], set()).add(shape)
    return {model: set(_largest(of)) for model, of in sorted(found.items())}


def _largest(of: set[Shape]) -> Iterator[Shape]:
    for window in {shape.window for shape in of}:
        same = (shape for shape in of if shape.window == window)
        yield max(same, key=lambda s: (s.sequences * s.length * s.heads, s))


def answer(gpu: hardware.Gpu, shape: Shape, one_call: bool = False) -> str:
    """What cuDNN says about a shape: the workspace of its backward calls, or why it refuses."""
    import jax
    import jax.numpy as jnp

    from jaxbench import mesh
    from jaxbench.jax_internals import attention_for_mesh, cudnn_attention
    from jaxbench.ops.attention import cudnn as attention
    from jaxbench.plan.absent import compile_only_devices

    seen, options = ask_cudnn.for_compiler(gpu)
    scale, window = shape.key_dim**-0.5, shape.window or None

    def loss(query, key, value, *sinks):
        if one_call:
            out = cudnn_attention(query, key, value, scale, window)
        else:
            out = attention.call(query, key, value, scale, window, *sinks)
        return jnp.sum(out.astype(jnp.float32))

    def array(heads: int, features: int) -> jax.ShapeDtypeStruct:
        shape_of = (shape.sequences, shape.length, heads, features)
        return jax.ShapeDtypeStruct(shape_of, jnp.bfloat16)

    operands = [
        array(shape.heads, shape.key_dim),
        array(shape.kv_heads, shape.key_dim),
        array(shape.kv_heads, shape.value_dim),
    ]
    if shape.sinks:
        operands.append(jax.ShapeDtypeStruct((shape.heads,), jnp.float32))
    on = mesh.make_mesh((1,) * len(mesh.AXES), compile_only_devices(seen, 1))
    with jax.set_mesh(on), attention_for_mesh():
        lowered = jax.jit(jax.grad(loss, argnums=tuple(range(len(operands))))).lower(*operands)
        try:
            text = lowered.compile(compiler_options=options).as_text()
        except jax.errors.JaxRuntimeError as error:
            reasons = ask_cudnn.refusals(error) or [str(error).splitlines()[0]]
            return f"no: {reasons[0]}"
    calls = [line for line in text.splitlines() if '"__cudnn$fmhaSoftmaxBackward"' in line]
    workspaces = [int(size) for line in calls for size in re.findall(r"u8\[(\d+)\]", line)[:1]]
    return "yes: " + " + ".join(f"{size / 2**20:.0f}" for size in workspaces) + " MiB"


def page() -> str:
    gpus = [hardware.PLANNED[name] for name in GPUS]
    asked: dict[tuple, str] = {}
    rows: dict[tuple, list[str]] = {}
    for gpu in gpus:
        for model, of in shapes(gpu).items():
            for shape in sorted(of):
                key = gpu.name, shape
                asked[key] = asked.get(key) or answer(gpu, shape)
                rows.setdefault((model, *shape.cells(), asked[key]), []).append(gpu.name)
    published = [
        (model, ", ".join(names), *cells) for (model, *cells), names in sorted(rows.items())
    ]
    head_dims = [
        (f"{key_dim} / {value_dim}", ".".join(map(str, gpu.capability)), told)
        for key_dim, value_dim in REFUSED
        for gpu in (gpus[0], gpus[1], gpus[3])
        for told in [answer(gpu, Shape(1, 4096, 8, 8, key_dim, value_dim), one_call=True)]
    ]
    major, minor = re.findall(r"dnn_version_info {{ major: (\d+) minor: (\d+)", hardware.TARGET)[0]
    header = ("model", "GPU", "sequences", "heads", "features", "window", "cuDNN")
    return TEXT.format(
        version=f"{major}.{minor}",
        published="\n".join(table(header, published)),
        head_dims="\n".join(table(("features", "capability", "cuDNN"), head_dims)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    write = parser.parse_args().write
    os.environ["JAX_PLATFORMS"] = "cpu"
    if reason := stubs.load():
        raise SystemExit(f"cuDNN cannot be asked: {reason}")
    text = page()
    PAGE.write_text(text) if write else print(text, end="")


if __name__ == "__main__":
    main()
