"""The training itself: state, step, compiled program, loop.

Imports `models` and below, and `xla`. Read `step`, then `program`, then `loop`; for pipelines
`timetable`, `stages`, `ticks` and `pipeline`. `python -m jaxbench.train` is `run.command`.
"""
