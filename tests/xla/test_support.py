"""The page of what cuDNN computes: every published row is there, with a yes."""

import difflib
import os
import re
import subprocess
import sys

import jax
import pytest
from commands import ROOT
from compiled import needs_compiler

from jaxbench.base import hardware

SCRIPT = ROOT / "benchmarks" / "cudnn_support.py"


@pytest.fixture
def support(benchmark_script):
    return benchmark_script("cudnn_support")


def rows(text):
    """The cells of each row of the first table of a page."""
    table = text.partition("## Head dims")[0]
    return [
        [c.strip() for c in line.split("|")[1:-1]] for line in re.findall(r"^\|.*$", table, re.M)
    ][2:]


def test_the_largest_attention_of_every_row_is_a_yes(support):
    written = {}
    for model, gpus, *cells, answer in rows(support.PAGE.read_text()):
        assert answer.startswith("yes: "), (model, gpus)
        written |= {(model, gpu, *cells): answer for gpu in gpus.split(", ")}
    gpus = [hardware.PLANNED[name] for name in support.GPUS]
    expected = {
        (model, gpu.name, *shape.cells())
        for gpu in gpus
        for model, of in support.shapes(gpu).items()
        for shape in of
    }
    assert written.keys() == expected
    in_two = {key[:2] for key, answer in written.items() if "+" in answer}
    assert in_two == {("nemotron4_340b", gpu.name) for gpu in gpus if gpu.capability >= (10, 0)}


needs_asking = pytest.mark.skipif(
    jax.version.__version_info__ < (0, 11), reason="needs jax 0.11: Python 3.12 has it"
)


def asked(*arguments):
    """What the script prints. It runs in a process of its own, since it has to load stubs of CUDA
    before JAX loads the real libraries."""
    process = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@needs_compiler
@needs_asking
def test_cudnn_says_what_the_page_says_of_a_model(support):
    """Nemotron-4, whose head dims differ by GPU: one call on Hopper, two on Blackwell."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import cudnn_support as s\n"
        "assert s.stubs.load() is None\n"
        "for name in 'h100', 'gb200':\n"
        "    gpu = s.hardware.PLANNED[name]\n"
        "    (shape,) = s.shapes(gpu)['nemotron4_340b']\n"
        "    print(s.answer(gpu, shape))\n"
    )
    page = {(row[0], gpu): row[-1] for row in rows(support.PAGE.read_text())
            for gpu in row[1].split(", ")}  # fmt: skip
    expected = [page["nemotron4_340b", gpu] for gpu in ("H100", "GB200")]
    assert asked("-c", code).splitlines() == expected


@pytest.mark.nightly
@needs_compiler
@needs_asking
def test_cudnn_says_what_the_page_says(support):
    page, printed = support.PAGE.read_text(), asked(SCRIPT)
    assert printed == page, "\n".join(
        difflib.unified_diff(page.splitlines(), printed.splitlines(), n=0, lineterm="")
    )
