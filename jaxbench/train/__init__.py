"""Training: state, step, compiled program, loop.

Imports `models` and below, `forecast` and `xla`. Read `step`, then `program`, then `loop`; for
pipelines `pipeline_schedule`, `stages`, `pipeline_rank` and `pipeline`. `python -m jaxbench.train`
is `run.command`.
"""
