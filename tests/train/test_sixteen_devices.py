"""Experts on eight devices and another axis, each in a process of sixteen devices."""

import os
import subprocess
import sys

import pytest
from commands import ROOT
from sixteen_devices import CASES


@pytest.mark.nightly
@pytest.mark.parametrize("axis", CASES)
def test_experts_on_eight_devices_and_another_axis(axis):
    done = subprocess.run(
        [sys.executable, "tests/train/sixteen_devices.py", axis],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": ".:tests"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"expert 8 x {axis} 2: ")
