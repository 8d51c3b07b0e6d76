"""Eight virtual CPU devices, and every annotation checked at run time.

`slow` tests run with `--slow`, `nightly` ones with `--all`. A test skipped for what the machine
lacks has a reason of the form "needs THING: HOW TO GET IT"; the line before pytest's last one
counts them by thing.
"""

import copy
import importlib
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import quick

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}"
# After a compilation that dumps what its emitters do, XLA traces the stack for each diagnostic of
# MLIR; naming the functions of 800 stacks takes minutes where llvm-symbolizer is installed.
os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"

import jax
import jaxtyping
import pytest
import typecheck
from beartype.claw import beartype_packages
from xdist.scheduler import LoadScopeScheduling

WITHOUT_ARRAYS = ("recipe", "xla", "forecast", "plan", "report", "check")
"""Packages whose annotations beartype's own hook checks, ten times as fast as jaxtyping's."""

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
beartype_packages([f"jaxbench.{name}" for name in WITHOUT_ARRAYS], conf=typecheck.CONF)
jaxtyping.install_import_hook(
    [
        f"jaxbench.{path.stem}"
        for path in (Path(__file__).parents[1] / "jaxbench").iterdir()
        if path.stem not in WITHOUT_ARRAYS
    ],
    "typecheck.check",
)


SLOW, NIGHTLY = "slow: run with --slow", "nightly: run with --all"
"""The reasons why a test is skipped without these options."""


def runs_slow(config):
    return config.getoption("--slow") or config.getoption("--all")


def pytest_xdist_auto_num_workers(config):
    """One for each core. One more with Slurm's tests, whose worker mostly waits."""
    return (os.cpu_count() or 1) + runs_slow(config)


def pytest_configure(config):
    """Makes the cache of programs, for all workers."""
    if not hasattr(config, "workerinput"):
        os.environ[quick.FOLDER] = tempfile.mkdtemp(prefix="jaxbench-tests-")


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[quick.FOLDER])


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too, as CI does")
    parser.addoption("--all", action="store_true", help="run all tests, nightly ones too")
    parser.addoption("--write-golden", action="store_true", help="rewrite tests/golden")
    parser.addoption("--fuzz", type=int, default=300, help="mutated recipes to try")


@pytest.fixture(autouse=True)
def the_same_numbers(request, monkeypatch):
    """A test draws the same numbers from its module's `RNG`, whichever tests ran before it."""
    if rng := getattr(request.module, "RNG", None):
        monkeypatch.setattr(request.module, "RNG", copy.deepcopy(rng))


@pytest.fixture
def transformer_engine_on_a_cpu(monkeypatch):
    """Makes Transformer Engine use its fallback in plain JAX."""
    from jaxbench.plan import stubs

    stubs.load_for_engine(9)
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")


SHARING = (
    "test_slurm.py", "test_null_slurm.py", "test_compile.py", "test_pipeline_compiled.py",
    "test_te.py", "test_plan.py", "test_search.py", "test_survive.py", "test_equivalence.py",
    "test_cli.py", "test_checkpoint.py",
)  # fmt: skip
"""Files whose tests share what takes long to make, the longest first."""


def place(path):
    """The place of a file in the order of tests: that in `SHARING`, or behind them."""
    return SHARING.index(path.name) if path.name in SHARING else len(SHARING)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Moves the files that share something to the front; skips slow tests without `--slow`, nightly
    ones, which are slow, without `--all`, and compiled rows, also slow, without a compiler."""
    from jaxbench.plan.absent import INSTALL, installed

    without_compiler = pytest.mark.skipif(
        not installed("jax_plugins.xla_cuda13"), reason=f"needs the compiler for GPUs: {INSTALL}"
    )
    items.sort(key=lambda item: place(item.path))
    for item in items:
        if item.get_closest_marker("compiled"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(without_compiler)
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
            if not config.getoption("--all"):
                item.add_marker(pytest.mark.skip(reason=NIGHTLY))
        elif item.get_closest_marker("slow") and not runs_slow(config):
            item.add_marker(pytest.mark.skip(reason=SLOW))


def pytest_terminal_summary(terminalreporter, config):
    """Prints how many tests ran, and how many were skipped for want of what."""
    if config.option.collectonly:
        return
    stats = terminalreporter.stats
    ran = sum(len(stats.get(outcome, ())) for outcome in ("passed", "failed", "xfailed"))
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", ())]
    told = (skipped(count, reason) for reason, count in Counter(reasons).most_common())
    terminalreporter.write_line(f"{ran} ran; skipped: {', '.join(told) or 'none'}")


def skipped(count, reason):
    """A number of tests with a reason, as `5 for want of gcc (apt-get install gcc)`."""
    if reason in (SLOW, NIGHTLY):
        kind, _, option = reason.partition(": run with ")
        return f"{count} {kind} ones ({option})"
    thing, colon, remedy = reason.partition(": ")
    if thing.startswith("needs ") and colon:
        return f"{count} for want of {thing.removeprefix('needs ')} ({remedy})"
    return f"{count}: {reason}"


class Scheduler(LoadScopeScheduling):
    """One worker takes all tests of a file that shares something."""

    def _split_scope(self, nodeid):
        file, _, _ = nodeid.partition("::")
        return file if place(Path(file)) < len(SHARING) else nodeid


def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)


@pytest.fixture
def benchmark_script(monkeypatch):
    """Imports a script of `benchmarks/` by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return importlib.import_module
