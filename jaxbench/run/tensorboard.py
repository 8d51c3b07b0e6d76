"""The steps of a run as event files for TensorBoard. They are written by TensorBoard's own library
into the run's folder; nothing leaves the machine."""

from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.versions import installed


def check_library() -> None:
    """Raises RecipeError if the library that writes the files is not installed."""
    if not installed("tensorboardX"):
        raise RecipeError(
            "--tensorboard needs tensorboardX: pip install -c constraints.txt -e '.[tensorboard]'"
        )


class TensorBoard:
    """Event files in the run's `tensorboard/`, of a run whose first step is `start`."""

    def __init__(self, folder: Path, record: dict[str, Any], start: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)
        self._writer.add_text("command", record["command"], start)

    def step(self, line: dict[str, Any]) -> None:
        """One point of each figure in a line of steps.jsonl."""
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "start"):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
