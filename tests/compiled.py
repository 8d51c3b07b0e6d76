"""Rows compiled for GPUs that are not there."""

import contextlib
import os
import tempfile

import jax
import pytest

from jaxbench import mesh
from jaxbench.base.hardware import H100, Gpu
from jaxbench.forecast.guide import guide
from jaxbench.plan.absent import compile_only_devices
from jaxbench.plan.plan import Memory
from jaxbench.recipe import recipes
from jaxbench.results.throughput import model_flops
from jaxbench.train.program import compile_program, parse_program
from jaxbench.xla.collectives import Collective, completed
from jaxbench.xla.hlo import Program

needs_compiler = pytest.mark.compiled
"""Skips where the compiler is not installed, and without `--slow` (conftest.py)."""


@contextlib.contextmanager
def captured_stderr():
    """A list that ends with what the process, XLA included, has written to stderr meanwhile."""
    written = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            written.append(file.read().decode())


def collectives_of(program: Program) -> list[Collective]:
    """Every collective of a program over more than one device."""
    candidates = (completed(i, scope, runs) for i, scope, runs in program.walk())
    return [c for c in candidates if c is not None]


class Compiled:
    """A row compiled for H100s or other GPUs."""

    def __init__(self, name: str, gpus: int, *overrides: str, gpu: Gpu = H100):
        recipe = recipes.load(name)
        # Not `auto`: another default must not change these tests.
        parsed = recipes.parse_overrides(["precision.implementation=xla", *overrides])
        self.run = recipes.resolve(recipe, gpus, overrides=parsed)
        devices = compile_only_devices(gpu, self.run.gpus)
        self.mesh = mesh.make_mesh(self.run.mesh_shape, devices)
        with jax.set_mesh(self.mesh), captured_stderr() as written:
            self.compiled = compile_program(self.run, guide=guide).program
        self.warnings = written[0]
        self.program = parse_program(self.compiled, self.run)
        self.collectives = collectives_of(self.program)

    @property
    def peak_gib(self) -> float:
        return Memory.of(self.compiled, H100).peak / 2**30

    @property
    def executed_ratio(self) -> float:
        """Executed matrix and attention FLOPs over the model's."""
        model = model_flops(self.run, "full") * self.run.batch.global_batch / self.run.gpus
        return sum(self.program.flops().values()) / model
