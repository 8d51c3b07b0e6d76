"""Compares plans of the same rows between versions of jax: peak memory, traffic, exposed time,
bound, forecast and launches, by `plan --diff`.

    python benchmarks/jax_versions.py PYTHON PYTHON .. [--rows ROW ..] [--gpu h100] [--percent 2]
        [--output docs/jax_versions.md]

Each PYTHON belongs to an environment with this package's dependencies and the compiler (`.[plan]`).
All plan this tree's code. The first is compared with each of the others. The status is 1 if a row
got worse in one of them (`jaxbench.plan.sweep.compare_tables`). Plans stay in
results/jax_versions, so that an interrupted call can continue.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from tables import replace_table

from jaxbench.base import hardware
from jaxbench.plan import sweep
from jaxbench.plan.processes import plan_all
from jaxbench.plan.systems import Target
from jaxbench.recipe.settings import Run

ROWS = (
    "llama2_70b_bf16:64", "llama2_70b_fp8:64", "llama31_8b_fp8:8", "llama31_405b_bf16:512",
    "grok1_314b_bf16:512", "nemotron4_340b_bf16:128", "nemotronh_56b_bf16:128",
    "qwen3_30b_a3b_bf16:16", "gpt_oss_120b_bf16:64", "nemotron3_nano_30b_a3b_bf16:16",
)  # fmt: skip
"""A row of each family but those that compile longest."""

FOLDER = Path("results", "jax_versions")


def runs(names: list[str], target: Target) -> list[Run]:
    """The rows of these names. Raises SystemExit for one that no recipe has."""
    known = {f"{run.recipe}:{run.row}": run for run in sweep.rows(target)}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no row {unknown[0]} on {target.name}; expected RECIPE:GPUS, as {ROWS[0]}")
    return [known[name] for name in names]


def write_table(names: list[str], target: Target) -> int:
    """Plans the rows with this environment's jax, and writes their table (plan.csv) into the
    current folder; 1 if a row failed, and is missing in it."""
    plans, failures = plan_all(runs(names, target), target)
    lines = [f"{run.recipe}-{run.row}: {reason}" for run, reason in failures.items()]
    table = [sweep.cells(plan, target.name) for plan in plans.values()]
    sweep.write_table(table, lines, Path(), [target])
    return int(bool(failures))


def jax_of(python: str) -> str:
    """The version of jax in an environment."""
    code = "from importlib.metadata import version; print(version('jax'))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def table_of(python: str, name: str, args: argparse.Namespace) -> Path:
    """The table of an environment. Raises SystemExit if it has none."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--table", "--gpu", args.gpu, "--rows", *args.rows]
    # Absolute, since it runs in the folder; not resolved, since an environment's is a link.
    python = str(Path(python).absolute())
    command = [python, str(Path(__file__).resolve()), python, *options]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, cwd=folder, env=variables, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"{python}: exit status {done.returncode}")
    return folder / "plan.csv"


def main() -> int:
    """Plans in every environment and prints what moved; 1 if a row got worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="+", help="of environments; the first is the reference")
    parser.add_argument("--rows", nargs="+", default=ROWS, help="as llama2_70b_bf16:64")
    parser.add_argument("--gpu", choices=list(hardware.PLANNED), default="h100")
    parser.add_argument("--percent", type=float, default=2.0, help="change that is reported")
    parser.add_argument("--output", type=Path, help="document whose table is replaced")
    parser.add_argument("--table", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    target = Target(hardware.PLANNED[args.gpu], args.gpu)
    if args.table:
        return write_table(args.rows, target)
    runs(args.rows, target)
    names = [jax_of(python) for python in args.pythons]
    if len(names) < 2 or len(set(names)) < len(names):
        parser.error(f"jax {', '.join(names)}: expected environments with two versions or more")
    tables = {name: table_of(p, name, args) for name, p in zip(names, args.pythons, strict=True)}
    lines, worse = [], False
    for name in names[1:]:
        moved, worse_here = sweep.compare_tables(tables[names[0]], tables[name], args.percent)
        lines += [f"jax {names[0]} -> {name}, {args.gpu}, {len(args.rows)} rows:", "", moved, ""]
        worse |= worse_here
    print("\n".join(lines))
    if args.output:
        block = "\n".join(lines)
        replace_table(args.output, f"```text\n{block}```")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
