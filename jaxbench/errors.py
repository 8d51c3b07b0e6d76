"""What goes wrong, in one line each: for the terminal, and for run.json."""


class RecipeError(ValueError):
    """A user's mistake, in a recipe, in a setting or on the command line: what is wrong, and what
    is expected."""


class RunFailed(RuntimeError):
    """The run cannot give a valid result."""
