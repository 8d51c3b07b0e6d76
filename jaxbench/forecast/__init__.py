"""How long a step will take: measured kernels and links under the real schedule. No JAX.

Imports `xla`, `hardware` and `errors`. `tables` holds what was measured, `costs` turns it into the
time of a kernel or a collective of any size, `forecast` walks the schedule with it. Nothing is
fitted to a training step.
"""
