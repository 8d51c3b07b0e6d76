"""Checks of `benchmarks/gpu.py`, most important first.

`trains`: training through the command. `operators`: every operator at real shapes beside the CPU.
`survives`: checkpoints, profiles, PGLE, compiler options. `speed`: the GPU's ceilings and where a
step's time goes. `choices`: settings that were chosen from compiled programs alone, A/B. `mixers`:
Mamba-2 implementations. `kernels`: the tables of forecasts. Each check yields `Finding`s and runs
in a separate process; `context` has its mode and helpers.
"""
