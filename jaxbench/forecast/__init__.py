"""Forecast of step times: measured kernels and links under the compiled schedule. Needs no JAX.

Imports `xla` and `base`. `tables` holds the measurements, `costs` turns them into the time of a
kernel or a collective of any size, `forecast` walks the schedule with these times, `interval` says
how far to trust the result, and `sensitivity` walks with one assumption changed. `interpolate` is
between measured sizes, `guide` makes a profile for XLA's scheduler, and `goodput` adds failures of
a long run. Nothing in a forecast is fitted to a training step; only its interval rests on such
steps.
"""
