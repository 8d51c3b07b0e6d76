"""What goes wrong, in one line each: for the terminal, for run.json, and for whoever started it."""

STATUS = {
    "failed": 1,
    "mistake": 2,
    "numbers": 3,
    "memory": 4,
    "storage": 5,
    "gpu": 6,
    "network": 7,
    "lost": 8,
}
"""Causes of a failure, and the exit status by which launchers tell them apart: an implausible loss,
gradient or rate, a device without room, files that cannot be written or read, a GPU that
fails, another process or the way to it that is gone, a process of this host that is gone. `failed`
is all else that restarting would not mend. `launch/verdict.py` imports this with Pythons from 3.7
on."""


class RecipeError(ValueError):
    """A user's mistake, in a recipe, in a setting or on the command line: what is wrong, and what
    is expected."""


class RunFailed(RuntimeError):
    """The run cannot give a valid result; `cause` is one of `STATUS`."""

    def __init__(self, message: str, cause: str = "failed"):
        super().__init__(message)
        self.cause = cause
