"""Streams of a run's steps for tools with which people watch runs. They use the tools' own
libraries and write into the run's folder. Nothing leaves the machine."""

from pathlib import Path
from typing import Any

from jaxbench.base.errors import RecipeError
from jaxbench.base.versions import installed


class TensorBoard:
    """Event files in the run's `tensorboard/`."""

    def __init__(self, folder: Path, record: dict[str, Any], start: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)
        self._writer.add_text("command", record["command"], start)

    def step(self, number: int, figures: dict[str, float]) -> None:
        """One point of each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, number)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases in the run's `wandb/`. If you want it, `wandb sync` sends it."""

    def __init__(self, folder: Path, record: dict[str, Any], start: int):
        import wandb

        recipe: dict[str, Any] = record["recipe"]
        self._run = wandb.init(
            mode="offline", dir=folder, project="jaxbench", config=recipe,
            name=f"{recipe['recipe']}-{recipe['row']}",
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )  # fmt: skip

    def step(self, number: int, figures: dict[str, float]) -> None:
        """One row of the run's history."""
        self._run.log(figures, step=number)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


Stream = TensorBoard | Wandb
"""A tool that gets each step."""

STREAMS: dict[str, tuple[str, type[Stream]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", Wandb),
}
"""For each name, the library that it needs and its stream."""


def check_stream(name: str | None) -> None:
    """Raises RecipeError if the library of a stream is not installed."""
    if name and not installed(library := STREAMS[name][0]):
        raise RecipeError(
            f"--stream {name} needs {library}: pip install -c constraints.txt -e '.[{name}]'"
        )


def open_stream(
    name: str | None, folder: Path, record: dict[str, Any], start: int
) -> Stream | None:
    """The stream of a run whose first step is `start`; None without a name."""
    return STREAMS[name][1](folder, record, start) if name else None
