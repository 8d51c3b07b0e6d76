"""Many processes as one job: joining, collective decisions, signals, the watchdog.

Imports `errors`, `files` and `jax_internals`. Start with `job`. `messages`, which writes to the
launcher, imports no JAX.
"""
