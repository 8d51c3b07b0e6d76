"""`jaxbench calibrate`: measures kernels of this machine's GPUs, for the forecasts of plans.

Start in `command`. Imports the operators and the format of the forecast's tables.
"""
