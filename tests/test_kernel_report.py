"""The page of Pallas kernels as compiled: every kernel is there, FP8 kernels use FP8 instructions,
and none spills more than is written down. `test_offsets.py` is about overflow."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from commands import ROOT
from compiled import needs_compiler

SCRIPT = ROOT / "benchmarks" / "pallas_kernels.py"

SUBSET = """
import json, pallas_kernels
cases = "nemotron3_nano_30b_a3b", "qwen3_30b_a3b, fp8"
print(json.dumps([kernel.cells() for kernel in pallas_kernels.report(cases, ("h100",))]))
"""
"""Prints cells of the page. A process of its own, since tests compile with flags for speed."""


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("pallas_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


@pytest.fixture(scope="module")
def written(script):
    """The cells of each row of the page, by kernel, case and architecture."""
    table = re.findall(r"^\| (`.*) \|$", script.PAGE.read_text(), re.M)
    rows = [line.split(" | ") for line in table]
    return {
        (name.strip("`"), case, architecture): [name, case, architecture, *cells]
        for name, case, architectures, *cells in rows
        for architecture in architectures.split(", ")
    }


def called():
    """The names of the kernels that the package calls."""
    for path in (ROOT / "jaxbench").rglob("*.py"):
        for name in re.findall(r'\bcall\(\s*partial\(.*?\),\s*f?"([^"]+)"', path.read_text(), re.S):
            yield re.compile(re.sub(r"{\w+}", r"\\w+", name))


def test_every_kernel_is_on_the_page(written):
    names = {name for name, *_ in written}
    missing = [known.pattern for known in called() if not any(map(known.fullmatch, names))]
    assert not missing
    assert len(names) >= 15


def test_every_matmul_of_the_page_is_by_the_tensor_cores_of_its_gpu_and_format(written):
    for (name, case, architecture), cells in written.items():
        if not name.startswith("grouped"):
            continue
        hopper = architecture == "sm_90a"
        expected = {
            "bf16": "wgmma.*bf16" if hopper else "tcgen05.*kind::f16",
            "fp8": r"wgmma.*e\dm\d\.e\dm\d" if hopper else "tcgen05.*kind::f8f6f4",
            "mxfp8": "tcgen05.*kind::mxf8f6f4",
            "nvfp4": "tcgen05.*kind::mxf4nvf4",
        }[case.rpartition(", ")[2]]
        assert re.fullmatch(rf"`{expected}\S*`", cells[-1]), (name, case, architecture)


@needs_compiler
def test_kernels_become_what_the_page_says(script, written):
    """On an H100, for the mixer that compiles fastest and one model's experts in FP8."""
    if f"with jax {jax.__version__}." not in script.PAGE.read_text():
        pytest.skip("needs the jax of the page: pip install -c constraints.txt jax")
    process = subprocess.run(
        [sys.executable, "-c", SUBSET], capture_output=True, text=True, cwd=SCRIPT.parent,
        env={name: v for name, v in os.environ.items() if name != "XLA_FLAGS"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout)
    names = {name.strip("`") for name, *_ in found}
    assert names >= {"ssd_to_x", "conv_silu_back", "grouped_weights"}
    assert found == [written[name.strip("`"), case, on] for name, case, on, *_ in found]
