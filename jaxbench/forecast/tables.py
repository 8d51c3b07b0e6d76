"""What was measured of a GPU and its links: small CSV files, sources in their first lines.

A line is a kind, a name, sizes joined by `x`, and what was measured, in microseconds unless the
kind says otherwise:

- `product`, its dtype, m x n x k: [m, k] times [k, n]
- `attention`, `forward` or `backward`, batch x heads x length x head dim, causal
- `collective`, its kind, GPUs x bytes of the whole buffer, inside an NVLink domain
- `memory`, `any`, bytes that a kernel reads and writes
- `network` and `nvlink`: shares of a link's rate that are reached (`measured/network.csv`)
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path

from jaxbench.errors import RecipeError

FOLDER = Path(__file__).parent / "measured"
GPU = "# gpu: "

KINDS = {"product": 3, "attention": 4, "collective": 2, "memory": 1, "network": 1, "nvlink": 1}
"""How many sizes a line of a kind has."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """Values by (kind, name) and sizes; `sources` says where they are from, kind by kind."""

    values: Mapping[tuple[str, str], Mapping[Sizes, float]]
    sources: Mapping[str, str]

    def names(self, kind: str) -> set[str]:
        """What there is of a kind."""
        return {name for known, name in self.values if known == kind}


@cache
def load(gpu: str, file: Path | None = None) -> Tables:
    """The tables of a GPU in the package; what `file` holds comes before them.

    Raises RecipeError for a GPU without tables, and for a file that is none or is of another GPU.
    """
    packaged = FOLDER / f"{gpu}.csv"
    if not packaged.is_file():
        known = ", ".join(
            sorted(path.stem for path in FOLDER.glob("*.csv") if path.stem != "network")
        )
        raise RecipeError(f"no kernels were measured on {gpu}; there are tables of {known}")
    values: dict[tuple[str, str], dict[Sizes, float]] = {}
    sources: dict[str, str] = {}
    for path in (FOLDER / "network.csv", packaged, *([file] if file else [])):
        of, found = read(path)
        if of not in (gpu, "any"):
            raise RecipeError(f"{path}: kernels of {of}, but {gpu} is planned; take --gpu {of}")
        values |= found
        for kind in {kind for kind, _ in found}:
            here = path.name if path == file else f"the package's {path.name}"
            sources[kind] = f"{here} and {sources[kind]}" if kind in sources else here
    return Tables(values, sources)


def read(path: Path) -> tuple[str, dict[tuple[str, str], dict[Sizes, float]]]:
    """The GPU of a file, and its values. Raises RecipeError where it is no such file."""
    values: dict[tuple[str, str], dict[Sizes, float]] = {}
    try:
        lines = path.read_text().splitlines()
        gpu = next(line.removeprefix(GPU).strip() for line in lines if line.startswith(GPU))
        _, *rows = csv.reader(dropwhile(lambda line: line.startswith("#"), lines))
        for kind, name, sizes, value in rows:
            key = tuple(map(int, sizes.split("x")))
            if len(key) != KINDS[kind] or min(key) < 0 or not 0 < float(value) < float("inf"):
                raise ValueError(f"{kind},{name},{sizes},{value}")
            values.setdefault((kind, name), {})[key] = float(value)
    except (OSError, ValueError, LookupError, StopIteration) as error:
        reason = "no line '# gpu: NAME'" if isinstance(error, StopIteration) else error
        raise RecipeError(f"{path}: not a table of kernels: {reason}") from error
    return gpu, values
