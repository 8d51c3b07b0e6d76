"""Compares our rows with MaxText's programs of the same work under one forecast.

Both train steps are compiled for the same absent GPUs with the same compiler, and forecast with the
same tables, so the error of the forecast largely cancels in the ratio. `peers.yaml` has the rows
and the configurations of MaxText that are tried. The fastest that fits is compared; a public
configuration fits, since somebody ran it.

    python benchmarks/peers.py --maxtext MAXTEXT/bin/python [ROW ..]   # compiles what is missing
    python benchmarks/peers.py --output docs/peers.md                  # forecasts and writes

MaxText is installed as `host_time_maxtext.py` says, and compiled as `maxtext_program.py` says.
Programs and plans stay in results/peers (or `--folder`). MaxText's program is compiled right after
ours, so the seconds of both are of one machine under about the same load.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import maxtext_program as maxtext
import yaml
from tables import replace_table, table

from jaxbench.plan import hlo_file, plan, processes, systems
from jaxbench.plan.compiled_step import Step
from jaxbench.recipe import recipes
from jaxbench.recipe.settings import Run

PEERS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FOLDER = Path("results", "peers")
COMBINE = (2**31, 2**31, 2**26)
"""Thresholds of the published runs of Llama 3 70B."""


@dataclass(frozen=True)
class Peer:
    """A row of ours, and the configurations of MaxText that do the same work."""

    entry: dict[str, Any]

    @property
    def name(self) -> str:
        recipe, gpu, gpus = self.entry["row"]
        return f"{recipe}-{gpus}-{gpu}"

    @property
    def target(self) -> systems.Target:
        return systems.find(self.entry["row"][1])

    @property
    def run(self) -> Run:
        """Our row."""
        recipe, _, gpus = self.entry["row"]
        return recipes.resolve(recipes.load(recipe).on(self.target.gpu), gpus)

    def programs(self) -> Iterator[maxtext.Program]:
        """MaxText's configurations."""
        run = self.run
        each = run.batch.global_batch / run.gpus
        for one in self.entry["tries"]:
            batch = one.get("batch", each)
            yield maxtext.Program(
                gpu=self.target.name,
                gpus=run.gpus,
                dtype=run.precision.dtype,
                sequence=run.batch.sequence_length,
                batch=batch,
                mesh=one["mesh"],
                options={
                    "model_name": self.entry["model"],
                    "override_model_config": True,
                    "base_num_decoder_layers": run.model.layers,
                    "gradient_accumulation_steps": round(each / batch),
                } | self.entry.get("options", {}) | one["options"],
                combine=COMBINE,
                profiled=True,
            )  # fmt: skip

    def stem(self, program: maxtext.Program, folder: Path) -> Path:
        """The names of a program's files begin with this."""
        return folder / f"{self.name}-{program.digest}"


@dataclass(frozen=True)
class Side:
    """What we compare of a program. Bytes are per GPU and step; `work` are the FLOPs that the
    program executes over those that the model needs."""

    mesh: str
    step: Step
    work: float
    peak: int
    limit: int
    compile_s: float

    @property
    def step_s(self) -> float:
        return self.step.forecast_step_s

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


@dataclass(frozen=True)
class Pair:
    """Our program and MaxText's fastest one, of all that were compiled."""

    peer: Peer
    ours: Side
    theirs: Side
    tried: int
    failed: int

    @property
    def ratio(self) -> float:
        return self.ours.step_s / self.theirs.step_s


def our_plan(peer: Peer, folder: Path) -> Path:
    """The file with the plan of our row."""
    return folder / f"{peer.name}.json"


def failure(stem: Path) -> Path:
    """The file with the error of a program of MaxText that does not compile."""
    return maxtext.path(stem, ".error.txt")


def compile_missing(python: str, peer: Peer, folder: Path) -> None:
    """Compiles our program and MaxText's, except those in the folder. A program of MaxText that
    does not compile leaves its error in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    if not our_plan(peer, folder).is_file():
        found = processes.plan_run(peer.run, peer.target, peer.run.recipe)
        if isinstance(found, str):
            sys.exit(f"{peer.name}: {found}")
        made = processes.folder(peer.run, peer.target) / "plan.json"
        shutil.copy(made, our_plan(peer, folder))
        print(f"{peer.name}: ours {found.forecast_step_s:.3f} s", flush=True)
    for program in peer.programs():
        stem = peer.stem(program, folder)
        error = failure(stem)
        if error.is_file():
            continue
        try:
            maxtext.compiled(python, program, stem)
        except RuntimeError as reason:
            error.write_text(str(reason))
            print(f"{peer.name}: {described(program)}: {str(reason).splitlines()[-1]}", flush=True)
            continue
        found = theirs(program, stem, peer.target, 1.0)
        print(f"{peer.name}: {described(program)}: {found.step_s:.3f} s, "
              f"{found.peak / 2**30:.0f} GiB", flush=True)  # fmt: skip


def described(program: maxtext.Program) -> str:
    """The mesh and the policy of a program of MaxText."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items())
    batch = f"{program.batch:g} x {program.options['gradient_accumulation_steps']}"
    return f"{mesh}, {program.options['remat_policy']}, batch {batch}"


def theirs(program: maxtext.Program, stem: Path, target: systems.Target, needed: float) -> Side:
    """MaxText's program in its files; the model needs this many FLOPs per GPU."""
    step = hlo_file.read(maxtext.scheduled(stem), target)
    facts = maxtext.facts(stem)
    return Side(
        mesh=described(program),
        step=step,
        work=sum(step.flops.values()) / needed,
        peak=facts.peak,
        limit=target.gpu.memory_limit,
        compile_s=facts.lower_s + facts.compile_s,
    )


def pair(peer: Peer, folder: Path) -> Pair | None:
    """Both sides, from the folder. None if a program is missing that no error accounts for, or if
    none of MaxText's can be compared."""
    if not our_plan(peer, folder).is_file():
        return None
    planned = plan.read(our_plan(peer, folder))
    size = planned.bytes_per_device
    ours = Side(
        mesh=planned.mesh,
        step=planned,
        work=planned.flops.recompute_ratio,
        peak=size.peak,
        limit=size.limit,
        compile_s=planned.lower_s + planned.compile_s,
    )
    tries = [*zip(peer.entry["tries"], peer.programs(), strict=True)]
    found = [
        (one.get("public", False), theirs(program, stem, peer.target, planned.flops.model_full))
        for one, program in tries
        if maxtext.path(stem := peer.stem(program, folder), ".json").is_file()
    ]
    failed = sum(failure(peer.stem(program, folder)).is_file() for _, program in tries)
    if len(found) + failed < len(tries):
        return None
    known = [side for ran, side in found if (ran or side.fits) and not side.step.forecast.unknown]
    if not known:
        return None
    best = min(known, key=lambda side: side.step_s)
    return Pair(peer, ours, best, len(found), failed)


QUANTITIES: dict[str, Any] = {
    "step s": lambda side: f"{side.step_s:.3f}",
    "peak GiB": lambda side: f"{side.peak / 2**30:.0f}",
    "FLOPs executed over needed": lambda side: f"{side.work:.2f}",
    "sent GiB": lambda side: f"{side.step.wire_bytes / 2**30:.0f}",
    "exposed s": lambda side: f"{maxtext.exposed(side.step.forecast):.3f}",
    "launches": lambda side: f"{side.step.launches:,}",
    "compile s": lambda side: f"{side.compile_s:.0f}",
}


def document(pairs: list[Pair], missing: list[str]) -> str:
    """The tables of the document. `missing` are rows without both programs."""
    steps = [pair.ratio for pair in pairs]
    compile_s = [pair.ours.compile_s / pair.theirs.compile_s for pair in pairs]
    lines, programs, notes = [], [], []
    for found in pairs:
        recipe, gpu, gpus = found.peer.entry["row"]
        row = f"{recipe}, {gpus} {gpu.upper()}"
        cells = [f"{show(found.ours)}, {show(found.theirs)}" for show in QUANTITIES.values()]
        lines.append([row, f"{found.ratio:.2f}", *cells])
        tried = f"{found.tried}" + (f", {found.failed} did not compile" if found.failed else "")
        programs.append([row, found.ours.mesh, found.theirs.mesh, tried])
        if note := found.peer.entry.get("note"):
            notes.append(f"- {row}: {note}.")
    return "\n".join([
        f"{time.strftime('%Y-%m-%d')}. Our step over MaxText's by forecast, {len(pairs)} rows: "
        f"median {statistics.median(steps):.2f}, best {min(steps):.2f}, worst {max(steps):.2f}. "
        f"Seconds to compile, ours over MaxText's: median {statistics.median(compile_s):.2f}, "
        f"worst {max(compile_s):.2f}.", "",
        "Each cell has our figure, then MaxText's.", "",
        *table(["row", "ours over MaxText's", *QUANTITIES], lines),
        *notes, *[""] * bool(notes),
        *[f"Not compared yet: {', '.join(missing)}.", ""] * bool(missing),
        "### The programs", "",
        *table(["row", "our mesh", "MaxText's mesh, remat policy, sequences per GPU x steps of "
                "accumulation", "configurations tried"], programs),
    ])  # fmt: skip


def main() -> None:
    """Compiles what is missing, or writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="parts of names, as llama2_70b_bf16-64-h100")
    parser.add_argument("--maxtext", help="Python of the environment with MaxText, to compile")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the programs")
    parser.add_argument("--output", type=Path, help="document whose tables are replaced")
    args = parser.parse_args()
    peers = [Peer(entry) for entry in PEERS]
    peers = [p for p in peers if not args.rows or any(part in p.name for part in args.rows)]
    if args.maxtext:
        for peer in peers:
            compile_missing(args.maxtext, peer, args.folder)
    pairs = [found for peer in peers if (found := pair(peer, args.folder))]
    if not pairs:
        sys.exit(f"no pair of programs in {args.folder}; --maxtext PYTHON compiles them")
    compared = {found.peer.name for found in pairs}
    text = document(pairs, [peer.name for peer in peers if peer.name not in compared])
    if args.output:
        replace_table(args.output, text)
    print(text)


if __name__ == "__main__":
    main()
