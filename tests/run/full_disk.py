"""A recorder on a disk that is full at a chosen moment: `full_disk.py FOLDER step|finish`."""

import sys
from pathlib import Path

from jaxbench.base.errors import RunFailed
from jaxbench.recipe import recipes
from jaxbench.run.records import Recorder

STEP = {
    "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "step_time_s": 1.0, "memory_bytes": 1,
    "peak_memory_bytes": 1,
}  # fmt: skip


def fill(folder):
    """Leaves not a byte."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass


folder, moment = Path(sys.argv[1]), sys.argv[2]
run = recipes.resolve(recipes.load("llama31_8b_bf16"), "smoke")
record = {
    "label": run.label, "comparable": True, "recipe": recipes.describe(run), "published": None,
    "not_comparable_because": [], "hardware": {"device": "x86_64", "null": False, "processes": 1},
    "first_step": 0, "starts": [{"step": 0, "changed": {}}],
}  # fmt: skip
recorder = Recorder(folder, run, record)
for step in range(2):
    recorder.step(STEP | {"step": step})
if moment == "finish":
    (folder / ".run.json.reserve").unlink()
fill(folder)
try:
    for step in range(2, 50 if moment == "step" else 2):  # the last page may have room for some
        recorder.step(STEP | {"step": step})
except RunFailed as error:
    print(f"step: {error}", file=sys.stderr)
try:
    recorder.finish("failed", "full", None)
except RunFailed as error:
    print(f"finish: {error}", file=sys.stderr)
