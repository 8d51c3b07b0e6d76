"""The page of what cuDNN computes: every published row is there, with a yes."""

import difflib
import importlib.util
import os
import re
import subprocess
import sys

import null_gpus
import pytest
from commands import ROOT
from compiled import needs_compiler

from jaxbench import hardware

SCRIPT = ROOT / "benchmarks" / "cudnn_support.py"


@pytest.fixture(scope="module")
def support():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("cudnn_support", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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


@needs_compiler
@pytest.mark.skipif(null_gpus.missing() is not None, reason=str(null_gpus.missing()))
def test_cudnn_says_what_the_page_says(support):
    process = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "XLA_FLAGS")},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    page = support.PAGE.read_text()
    assert process.stdout == page, "\n".join(
        difflib.unified_diff(page.splitlines(), process.stdout.splitlines(), n=0, lineterm="")
    )
