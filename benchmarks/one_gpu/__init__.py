"""Checks of `benchmarks/gpu.py`.

`operators`: every operator at real shapes next to the CPU. `trains`: the training command, tiny
rows next to a CPU's losses and real ones. `survives`: checkpoints, profiles, PGLE, compiler
options. `speed`: the GPU's ceilings. `rows`: the steps of one-GPU rows and their kernels next to
the forecast. `tiles` and `mixers`: sizes of the kernels of grouped matmuls and of Mamba-2.
`choices`: settings that were chosen from compiled programs alone, A/B. `kernels`: the tables of
forecasts. Each check yields `Finding`s and runs in a separate process; `context` has its mode and
helpers.
"""
