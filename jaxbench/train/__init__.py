"""Training: state, step, compiled program, loop.

Read `step` and `optimizer`, then `program`, `program_checks` and `loop`. For pipelines read
`pipeline_schedule`, `pipeline_stages`, `pipeline_ends`, `pipeline_rank` and `pipeline`.
`kernel_timing` is for `--tune-kernels`. `python -m jaxbench.train` is `run.command`.

Imports `models` and below, and `xla`.
"""
