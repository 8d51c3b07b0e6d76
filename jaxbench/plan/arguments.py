"""Options of `jaxbench plan` and their checks. Needs no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError
from jaxbench.base.terminal import Parser, check_folder
from jaxbench.forecast.tables import load
from jaxbench.recipe import recipes
from jaxbench.recipe.checks import positive

MODES = ("diff", "all", "hlo", "profile", "search")
"""Options that do something else than planning one row."""

DEFAULT_GPU = "h100"

LIMIT = 24
"""The number of candidates that a search compiles by default."""

EXAMPLES = """
    jaxbench plan --config llama2_70b_bf16 --gpus 64
    jaxbench plan --config llama31_405b_bf16 --gpus 96 --gpu gb200      no row: it is derived
    jaxbench plan --config llama31_8b_bf16 --gpus 8 --set batch.microbatch=2
    jaxbench plan --config llama2_70b_bf16 --gpus 64 --system nic=25    slower links
    jaxbench plan --config llama2_70b_bf16 --gpus 64 --format html --output plan.html
    jaxbench plan --config llama31_405b_fp8 --gpus 512 --search --limit 12
    jaxbench plan --profile RUN/profile/rank-0                          a profile and its forecast
    jaxbench plan --diff 'llama2_70b_bf16:64 execution.remat=full' llama2_70b_bf16:64
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command line, as `--help` documents them. `config` and `diff` are empty if
    they are not given."""

    config: str
    gpus: int | None
    set: list[str]
    gpu: str | None
    system: list[str]
    kernels: Path | None
    search: bool
    limit: int | None
    all: bool
    diff: list[str]
    percent: float
    hlo: Path | None
    profile: Path | None
    format: str
    output: Path | None
    dump: Path | None


# fmt: off
def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench plan", examples=EXAMPLES,
        description="Compiles a benchmark for GPUs that are not here. Says whether it fits, what a "
        "step sends over the network, and how long it will take.",
    )
    add = parser.add_argument_group("what to plan").add_argument
    add("--config", default="", help="recipe file or name, such as llama2_70b_bf16")
    add("--gpus", type=int, help="number of GPUs: the recipe's own, or any other that fills nodes")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting of the row: batch.microbatch=4")
    add = parser.add_argument_group("where it would run").add_argument
    add("--gpu", help=f"{', '.join(hardware.PLANNED)} (default {DEFAULT_GPU}), or a file.yaml "
        "with a GPU that we do not know: like: h100, and settings of --system")
    add("--system", action="append", default=[], metavar="KEY=VALUE",
        help="change the system: nvlink=450, nic=50 and host=55 (GB/s per GPU, one direction), "
        "node=8 (GPUs of a host), domain=8 (GPUs that NVLink joins), bandwidth=3352 (GB/s of a "
        "GPU's memory), memory=79 and host_memory=2048 (GiB of a GPU and of a host), power=700 (W "
        "of a GPU), bf16=989 (peak in TFLOP/s; also fp8, mxfp8, nvfp4), latency=14 (us of a step "
        "between domains); leaf=32 (domains below one leaf switch) with oversubscription=2 (what "
        "GPUs below a leaf send, over what its uplinks carry)")
    add("--kernels", type=Path, metavar="FILE",
        help="measurements of jaxbench calibrate; a forecast uses them instead of the package's")
    add = parser.add_argument_group("instead of one row").add_argument
    add("--search", action="store_true",
        help="try other meshes, policies and schedules for the row")
    add("--limit", type=int, help=f"candidates that --search compiles (default {LIMIT})")
    add("--all", action="store_true",
        help=f"plan every row of every recipe on {DEFAULT_GPU}, and the rows for other GPUs on "
        "those; with --gpu, --system or --kernels, every row on one GPU")
    add("--diff", nargs=2, default=[], metavar=("A", "B"),
        help="compare two plans: JSON files of --dump, or rows with settings, such as "
        "'llama2_70b_bf16:64 execution.remat=full'; or two tables of --all (plan.csv), with status "
        "1 if a row got worse")
    add("--percent", type=float, default=2.0,
        help="the smallest change that --diff of two tables reports (default 2)")
    add("--hlo", type=Path, metavar="FILE",
        help="describe a program that any code has compiled: the text of compiled.as_text(), or "
        "the program after optimizations that XLA_FLAGS=--xla_dump_to=DIR writes")
    add("--profile", type=Path, metavar="DIR",
        help="compare a profile (RUN/profile/rank-N of train --profile jax) with the forecast of "
        "its program: kernels, collectives by mesh axis, the largest differences; for a profile "
        "from elsewhere, --hlo names the program")
    add = parser.add_argument_group("what to write").add_argument
    add("--format", choices=("text", "json", "html"), default="text",
        help="default text; html is a page in a single file, for a row, --hlo, or "
        "--diff of two plans")
    add("--json", action="store_const", const="json", dest="format", help="short for --format json")
    add("--output", type=Path, metavar="PATH",
        help="file for --format json or html (default: print it), or folder for the table of "
        "--all (default results/plan)")
    add("--dump", type=Path, metavar="DIR", help="keep the scheduled program and the plan as JSON")
    return parser
# fmt: on


def parse_arguments(argv: Sequence[str] | None) -> Options:
    """The options of a command line. Raises RecipeError."""
    return Options(**vars(make_parser().parse_args(argv)))


def check_arguments(options: Options, gpu: hardware.Gpu) -> None:
    """Raises RecipeError for options that are missing or exclude each other."""
    modes = [f"--{name}" for name in MODES if getattr(options, name)]
    if modes == ["--hlo", "--profile"]:
        modes = ["--profile"]
    if len(modes) > 1:
        raise RecipeError(f"{' and '.join(modes)} exclude each other")
    if modes and options.dump:
        raise RecipeError(f"--dump is for a single plan, not for {modes[0]}")
    table = any(spec.endswith(".csv") for spec in options.diff)
    formats = {"--diff": ["html"] if not table else [], "--all": [], "--hlo": ["json", "html"],
               "--profile": ["json"], "--search": ["json"]}  # fmt: skip
    for mode in modes:
        row = ("set", "config", "gpus") if mode != "--search" else ()
        ignored = [f"--{name}" for name in row if getattr(options, name)]
        if options.format not in ("text", *formats[mode]):
            ignored.append(f"--format {options.format}")
        if ignored:
            raise RecipeError(f"{mode} does not take {ignored[0]}")
    if options.output and options.format == "text" and not options.all:
        raise RecipeError("--output needs --format json or html, or --all")
    if options.output and not options.all:
        check_folder(options.output)
    if options.kernels and not options.profile:
        load(gpu.name.lower(), options.kernels)
    if options.limit is not None and not options.search:
        raise RecipeError("--limit needs --search")
    positive("--", options, "limit")
    if modes in ([], ["--search"]) and not options.config:
        raise RecipeError(
            "--config and --gpus are needed (or --all, --hlo FILE, --profile DIR, or --diff A B)"
        )
    if modes in ([], ["--search"]) and options.gpus is None:
        rows = recipes.load(options.config).on(gpu).rows
        counts = ", ".join(map(str, sorted(row for row in rows if row != recipes.SMOKE)))
        raise RecipeError(
            f"--gpus is missing: {options.config} has rows for {counts} GPUs; plan derives others"
        )
