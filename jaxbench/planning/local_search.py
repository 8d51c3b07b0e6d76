"""Which candidate to compile next: a local search from the recipe's row, which comes first.

Of three compiled candidates two differ from the best so far in one thing (of a mesh with another
policy too, if memory then holds another), and the third is the best by estimate of all shapes that
were not tried. Estimates are corrected by what compiled plans show: of the same shape if there is
one, else of the best so far.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from jaxbench.hardware import Gpu
from jaxbench.planning.candidates import Shape, ladder, moves, shape, shapes, with_remat
from jaxbench.planning.estimate import Estimate, estimate, least_state
from jaxbench.recipe.settings import Run

WORTH = 1.5
"""A candidate is not tried when its corrected estimate is this many times the best step found."""

CAUTION = 0.95
"""The share of the memory limit that a shape may be expected to take before one of its policies was
compiled: estimates of another shape's memory are a few GiB off."""


@dataclass(frozen=True)
class Outcome:
    """What compiling a candidate gave; infinite where it could not be compiled, or its state alone
    does not fit."""

    seconds: float = math.inf
    peak: float = math.inf
    fits: bool = False


@dataclass
class Search:
    """What was tried for a row and what comes next; `tried` is None for what is being compiled."""

    row: Run
    gpu: Gpu
    fixed: frozenset[str] = frozenset()
    tried: dict[Run, Outcome | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch = replace(self.row.batch, microbatch=self.row.microbatch)
        self.row = replace(self.row, batch=batch)
        every = shapes(self.row, self.fixed)
        limit = self.gpu.memory_limit
        self.shapes = [run for run in every if least_state(run) <= limit]
        self.cannot_fit = len(every) - len(self.shapes)
        self._ladders: dict[tuple, list[str]] = {}
        self._estimates: dict[Run, Estimate] = {}

    def next(self) -> Run | None:
        """What to compile now; None when nothing is left that is worth it. Of a shape that is being
        compiled the outcome comes first."""
        if self.row not in self.tried:
            return self.row
        sources = [self._near(), self._far()]
        if len(self.tried) % 3 == 0:
            sources.reverse()
        compiling = {shape(run) for run, outcome in self.tried.items() if outcome is None}
        for source in sources:
            found = {
                run: self.expected(run)
                for run in source
                if run not in self.tried and shape(run) not in compiling
            }
            worth = [run for run in found if self._worth(run, found[run])]
            if worth:
                return min(worth, key=lambda run: self._rank(found[run]))
        return None

    def best(self) -> Run | None:
        """The fastest of those that fit."""
        fitting = {run: o.seconds for run, o in self.tried.items() if o and o.fits}
        return min(fitting, key=lambda run: fitting[run], default=None)

    def expected(self, run: Run) -> Estimate:
        """The estimate, corrected by what is known of the candidate's shape, or of the centre."""
        known = self._known()
        alike = [r for r in known if shape(r) == shape(run)]
        mine = self._estimate(run)
        if not (alike := alike or [r for r in known if r == self._centre()]):
            return mine
        bases = {r: self._estimate(r) for r in alike}
        base = min(bases, key=lambda r: abs(bases[r].peak - mine.peak))
        return Estimate(
            mine.seconds + known[base].seconds - bases[base].seconds,
            mine.peak + known[base].peak - bases[base].peak,
        )

    def _estimate(self, run: Run) -> Estimate:
        if run not in self._estimates:
            self._estimates[run] = estimate(run, self.gpu)
        return self._estimates[run]

    def _centre(self) -> Run:
        """The best, or what comes nearest to fitting."""
        peaks = {run: o.peak for run, o in self.tried.items() if o}
        return self.best() or min(peaks, key=lambda run: peaks[run], default=self.row)

    def _worth(self, run: Run, expected: Estimate) -> bool:
        best = self.best()
        if best is None:
            return True
        known = self.tried[best]
        assert known is not None
        most = known.seconds * (1 if self._is_known(run) else WORTH)
        return expected.peak <= self._room(run) and expected.seconds < most

    def _is_known(self, run: Run) -> bool:
        return shape(run) in {shape(known) for known in self._known()}

    def _known(self) -> dict[Run, Outcome]:
        """What was compiled."""
        return {run: o for run, o in self.tried.items() if o and math.isfinite(o.peak)}

    def _room(self, run: Run) -> float:
        """Bytes that a candidate may be expected to take."""
        return self.gpu.memory_limit * (1 if self._is_known(run) else CAUTION)

    def _rank(self, expected: Estimate) -> tuple[float, float]:
        """What fits by its shorter time, before what is over the limit by less."""
        return max(0.0, expected.peak - self.gpu.memory_limit), expected.seconds

    def _near(self) -> Iterator[Run]:
        """One thing other than in the centre."""
        centre = self._centre()
        bare = replace(centre, execution=replace(centre.execution, remat="full"))
        yield from self._policies(bare)
        for run in self.shapes:
            if moves(run, bare) == 1:
                if same := with_remat(run, centre.execution.remat):
                    yield same
                yield self._fitted(run)

    def _far(self) -> Iterator[Run]:
        """Every shape that was not tried, with the policy that is estimated to be best."""
        tried: set[Shape] = {shape(run) for run in self.tried}
        for run in self.shapes:
            if shape(run) not in tried:
                yield self._fitted(run)

    def _policies(self, run: Run) -> list[Run]:
        """The ladder of a shape."""
        if "execution.remat" in self.fixed:
            only = with_remat(run, self.row.execution.remat)
            return [only] if only else []
        kind = tuple(size > 1 for size in run.mesh_shape)  # what is worth keeping differs by axes
        if kind not in self._ladders:
            self._ladders[kind] = [rung.execution.remat for rung in ladder(run, self.gpu)]
        return [found for remat in self._ladders[kind] if (found := with_remat(run, remat))]

    def _fitted(self, run: Run) -> Run:
        """The shape with the policy that keeps most of what is expected to fit, or least."""
        rungs = self._policies(run) or [run]
        low, high, room = 0, len(rungs) - 1, self._room(run)
        while low < high:
            middle = (low + high + 1) // 2
            if self.expected(rungs[middle]).peak <= room:
                low = middle
            else:
                high = middle - 1
        return rungs[low]


def run_search(
    search: Search,
    limit: int,
    compile_all: Callable[[list[Run]], Iterator[tuple[Run, Outcome]]],
    at_a_time: int,
    holds: Callable[[Run], bool],
) -> None:
    """Compiles candidates until `limit` were, `at_a_time`, the row alone before all others. `holds`
    says whether the state alone fits."""
    compiled = 0
    while compiled < limit:
        batch: list[Run] = []
        most = 1 if compiled == 0 else min(at_a_time, limit - compiled)
        while len(batch) < most and (run := search.next()):
            search.tried[run] = None if holds(run) else Outcome()
            batch += [run] if holds(run) else []
        if not batch:
            return
        for run, outcome in compile_all(batch):
            search.tried[run] = outcome
        compiled += len(batch)
