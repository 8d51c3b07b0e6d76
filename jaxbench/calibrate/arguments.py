"""Options of `jaxbench calibrate`. Needs no JAX."""

from pathlib import Path

from jaxbench.base.terminal import Parser

EXAMPLES = """
    jaxbench calibrate --output mine.csv
    jaxbench plan --config llama2_70b_bf16 --gpus 512 --kernels mine.csv
"""


def make_parser() -> Parser:
    """The parser of all options; `--help` documents them."""
    parser = Parser(
        prog="jaxbench calibrate", examples=EXAMPLES,
        description="Measures matmuls, attention, copies and collectives on this machine's GPUs, "
        "for plan --kernels FILE.",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="table of measurements, CSV"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="test run on this CPU; plan refuses the file"
    )
    return parser
