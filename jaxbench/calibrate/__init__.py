"""`jaxbench calibrate`: measured kernels of this machine's GPUs, for forecasts of plans.

Start in `command`. Imports the operators and the format of the forecast's tables.
"""
