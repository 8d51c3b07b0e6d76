"""The training itself: state, step, compiled program, loop.

Imports `models` and below, and `xla`. Read `step`, then `program`, then `loop`. `python -m
jaxbench.train` is `run.command`.
"""
