"""Forecast of step times: measured kernels and links under the compiled schedule. No JAX.

Imports `xla`, `hardware` and `errors`. `tables` holds what was measured, `costs` turns it into the
time of a kernel or a collective of any size, `forecast` walks the schedule with it. Nothing is
fitted to a training step.
"""
