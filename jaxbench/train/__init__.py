"""Training: state, step, compiled program, loop.

Read `step`, then `program`, `program_checks` and `loop`. For pipelines read `pipeline_schedule`,
`pipeline_stages`, `pipeline_rank` and `pipeline`. `python -m jaxbench.train` is `run.command`.

Imports `models` and below, and `xla`.
"""
