"""Options of `jaxbench compare` and their checks. Needs no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxbench.base import hardware
from jaxbench.base.errors import RecipeError
from jaxbench.base.terminal import Parser, check_folder
from jaxbench.forecast.goodput import LLAMA3, RESTART_S
from jaxbench.plan import systems
from jaxbench.plan.arguments import LIMIT
from jaxbench.recipe.checks import positive

EXAMPLES = """
    jaxbench compare --config llama31_8b_bf16 --gpu h100,gb200 --gpus 8
    jaxbench compare --config llama31_70b --gpu h100,gb200 --gpus 64,256 --tokens 15e12 \\
        --price h100=2.5,gb200=6 --format html --output compare.html
    jaxbench compare --config llama31_8b_bf16 --gpu h100 --gpus 8,64 --mtbf 8000 --storage 20
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command line, as `--help` documents them. `price` is by the name of a
    GPU."""

    config: list[str]
    gpu: list[systems.Target]
    gpus: list[int]
    set: list[str]
    system: list[str]
    search: bool
    limit: int | None
    tokens: float
    price: dict[str, float]
    mtbf: float
    storage: float | None
    restart: float
    format: str
    output: Path | None


# fmt: off
def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench compare", examples=EXAMPLES,
        description="Compares GPUs that are not here for one model: step time, days, cost and "
        "energy for a number of tokens, with the time that failures cost. Every cell is a plan, "
        "compiled for these GPUs.",
    )
    add = parser.add_argument_group("what to compare").add_argument
    add("--config", action="append", required=True,
        help="recipe, or a model such as llama31_70b, which stands for its recipes, or the "
        "config.json of a Llama from Hugging Face; may be given several times. Of several "
        "recipes a GPU takes the narrowest format in which it multiplies and for which the "
        "recipe has rows")
    add("--gpu", type=words, required=True, metavar="GPU,..",
        help=f"GPUs: {', '.join(hardware.PLANNED)}, or a file.yaml as for --gpu of plan")
    add("--gpus", type=words, required=True, metavar="N,..", help="numbers of GPUs: 64,256")
    add("--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting of all rows")
    add("--system", action="append", default=[], metavar="[GPU:]KEY=VALUE",
        help="change a system as --system of plan does, for all GPUs or one: gb200:nic=100")
    add("--search", action="store_true",
        help="try other meshes, policies and schedules for each cell, as --search of plan does")
    add("--limit", type=int, help=f"candidates that --search compiles for a cell (default {LIMIT})")
    add = parser.add_argument_group("what it costs").add_argument
    add("--tokens", type=float, default=1e12, help="tokens to train on (default 1e12)")
    add("--price", type=words, default=[], metavar="GPU=PRICE,..",
        help="price of a GPU-hour in any currency: h100=2.5,gb200=6")
    add("--mtbf", type=float, metavar="GPU-HOURS", default=LLAMA3.mtbf_gpu_hours,
        help="GPU-hours from one failure to the next (default "
        f"{LLAMA3.mtbf_gpu_hours:,.0f}: {LLAMA3.what}; {LLAMA3.source})")
    add("--storage", type=float, metavar="GB/s",
        help="rate at which a job writes and reads checkpoints (default: 2000 GB/s for 16,384 GPUs "
        "as for Llama 3, and in proportion for others)")
    add("--restart", type=float, metavar="MINUTES", default=RESTART_S / 60,
        help="time from a failure until the job starts again, without loading the checkpoint "
        f"(default {RESTART_S / 60:.0f})")
    add = parser.add_argument_group("what to write").add_argument
    add("--format", choices=("text", "json", "html"), default="text",
        help="default text; html is a page in a single file")
    add("--output", type=Path, metavar="FILE", help="file for --format json or html")
    return parser
# fmt: on


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_options(argv: Sequence[str] | None) -> Options:
    """The options of a command line. Raises RecipeError."""
    words = vars(make_parser().parse_args(argv))
    read = {"gpu": _targets, "gpus": _numbers, "price": _prices}
    options = Options(**words | {name: parse(words[name]) for name, parse in read.items()})
    if not (options.gpu and options.gpus):
        raise RecipeError("--gpu and --gpus need at least one value each")
    names = [target.name for target in options.gpu]
    if unused := [name for name in options.price if name not in names]:
        raise RecipeError(f"--price {unused[0]}=..: {unused[0]} is not in --gpu")
    for name in ("tokens", "mtbf", "storage", "restart"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise RecipeError(f"--{name} {value:g}: expected a number above 0")
    positive("--", options, "limit")
    if options.limit is not None and not options.search:
        raise RecipeError("--limit needs --search")
    if options.output and options.format == "text":
        raise RecipeError("--output needs --format json or html")
    if options.output:
        check_folder(options.output)
    for text in options.system:
        gpu, colon, _ = text.rpartition(":")
        if colon and systems.named(gpu) not in names:
            raise RecipeError(f"--system {text}: {gpu} is not in --gpu")
    return options


def _targets(asked: Sequence[str]) -> list[systems.Target]:
    """The systems of `--gpu`, each once."""
    targets: dict[str, systems.Target] = {}
    for text in asked:
        target = systems.find(text)
        if targets.setdefault(target.name, target) != target:
            raise RecipeError(f"--gpu {text}: another GPU is called {target.name}; rename the file")
    return [*targets.values()]


def _numbers(texts: Sequence[str]) -> list[int]:
    """The numbers of `--gpus`, ascending, each once."""
    try:
        return sorted({int(text) for text in texts})
    except ValueError:
        raise RecipeError(f"--gpus {','.join(texts)}: expected numbers such as 64,256") from None


def _prices(texts: Sequence[str]) -> dict[str, float]:
    """The prices of `--price` by the name of their GPU."""
    return dict(map(_price, texts))


def _price(text: str) -> tuple[str, float]:
    """The GPU and the price of `gb200=6`."""
    gpu, _, price = text.partition("=")
    try:
        value = float(price)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise RecipeError(f"--price {text}: expected a GPU and a price above 0, such as h100=2.5")
    return systems.named(gpu), value
