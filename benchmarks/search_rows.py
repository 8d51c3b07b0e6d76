"""Searches rows for faster settings, and keeps what it tried in search_rows.csv.

Rows of a recipe and GPU that differ only in model copies are one group, of which the smallest row
is searched (`jaxbench plan --search`). A faster candidate becomes a recipe's own by hand, since it
has to hold for the other rows of its group too.

    python benchmarks/search_rows.py [RECIPE:GPU[:GPUS] ..]  # searches what is missing
    python benchmarks/search_rows.py --again RECIPE:GPU      # searches it although it is there
    python benchmarks/search_rows.py --list                  # names the rows that are missing
    python benchmarks/search_rows.py --document              # writes the table of docs/plan.md

Plans are kept in results/plan. Two calls at a time may search different rows.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from tables import ROOT, Key, keep, kept, key, replace_table, table

from jaxbench.base.errors import counted
from jaxbench.plan import search, systems
from jaxbench.recipe import planned, recipes
from jaxbench.results.plans import part_name

KEPT = Path(__file__).with_suffix(".csv")

MARK = "<!-- searched -->"

LARGEST = 5
"""The number of parts of the fastest step that are kept."""

COLUMNS = "row s", "fastest s", "compiled", "may be faster"
"""What the document shows of a search as it is kept."""

COPIES = re.compile(r"data \d+( x |$)")
"""The axis of model copies in the text of a mesh."""


def smallest_rows() -> list[dict[str, str]]:
    """The smallest row of each group in the table of all plans, without rows of one GPU."""
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for line in planned.read()[1]:
        if line["GPUs"] == "1":
            continue
        group = line["recipe"], line["GPU"], COPIES.sub("", line["mesh"])
        if group not in groups or int(line["GPUs"]) < int(groups[group]["GPUs"]):
            groups[group] = line
    return [*groups.values()]


def searched(name: Key, limit: int) -> dict[str, str]:
    """Searches a row with at most so many compiled candidates. Returns its line of the table."""
    recipe_name, gpu, gpus = name
    target = systems.find(gpu)
    recipe = recipes.load(recipe_name).on(target.gpu)
    row = recipes.resolve(recipe, int(gpus))
    # One at a time, so that each choice knows the results of all earlier ones.
    state = search.run(recipe, row, recipe_name, limit, target, at_a_time=1)
    best = next((line for line in search.table(state.tried, state.row) if line["fits"]), None)
    return {
        "recipe": recipe_name,
        "GPU": gpu,
        "GPUs": gpus,
        "row s": f"{state.tried[state.row].seconds:.3f}",
        "fastest s": f"{best['step_s']:.3f}" if best else "",
        "fastest sets": " ".join(best["set"]) if best else "",
        "largest parts": largest(best["parts_s"]) if best else "",
        "compiled": str(len(state.tried)),
        "not compiled": str(sum(outcome.plan is None for outcome in state.tried.values())),
        "may be faster": str(len(state.to_compile())),
        "searched": time.strftime("%Y-%m-%d"),
    }


def largest(parts_s: dict[str, float]) -> str:
    """The largest parts of a step, with their shares in percent."""
    step_s = sum(parts_s.values())
    names = sorted(parts_s, key=parts_s.__getitem__, reverse=True)[:LARGEST]
    return ", ".join(f"{part_name(name)} {100 * parts_s[name] / step_s:.0f}" for name in names)


def document() -> str:
    """The rows that were searched, those first that are slowest next to the published step."""
    plans, lines = {key(plan): plan for plan in planned.read()[1]}, []
    for name, line in kept(KEPT).items():
        published_s = plans[name]["published s"]
        ratio = float(plans[name]["forecast s"]) / float(published_s) if published_s else 0.0
        lines.append((ratio, name, line))
    lines.sort(key=lambda entry: -entry[0])
    missing = len(smallest_rows()) - len(lines)
    return "\n".join([
        f"{len(lines)} groups of rows are searched so far, {missing} are not.", "",
        *table(
            ["recipe", "GPU", "GPUs", "forecast / published", *COLUMNS,
             "parts of the fastest step, %"],
            (
                [*name, f"{ratio:.2f}" if ratio else "",
                 *(line[column] for column in COLUMNS), line["largest parts"]]
                for ratio, name, line in lines
            ),
        ),
    ])  # fmt: skip


def main() -> None:
    """Searches what is missing, or lists it, or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="rows, as llama31_70b_bf16:h100:64; all without")
    parser.add_argument("--again", action="store_true", help="search also what is in the table")
    parser.add_argument("--list", action="store_true", help="name the rows, and search nothing")
    parser.add_argument("--document", action="store_true", help="write the table, search nothing")
    parser.add_argument("--limit", type=int, default=4, help="candidates of a row, with the row")
    args = parser.parse_args()
    if args.document:
        replace_table(ROOT / "docs" / "plan.md", document(), MARK)
        return
    if args.limit < 2:
        parser.error("--limit is at least 2: one candidate is the row itself")
    asked = [row.split(":") for row in args.rows]
    for line in smallest_rows():
        name = key(line)
        wanted = not asked or any([*name][: len(one)] == one for one in asked)
        if not wanted or (name in kept(KEPT) and not args.again):
            continue
        if args.list:
            print(f"{':'.join(name)}, {line['mesh']}: a plan takes {line['compile s']} s")
            continue
        found = searched(name, args.limit)
        keep(KEPT, found)
        sets = found["fastest sets"]
        faster = f", {found['fastest s']} s with {sets}" if sets else ""
        tried = counted(int(found["compiled"]), "candidate")
        left = f"{found['may be faster']} more may be faster"
        print(f"{':'.join(name)}: {found['row s']} s{faster}; {tried}, {left}", flush=True)


if __name__ == "__main__":
    main()
