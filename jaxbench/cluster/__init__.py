"""Many processes as one job: joining, its devices, collective decisions, timing of each GPU and
link, signals, the watchdog, and how a process ends.

Imports `errors`, `files`, `hardware` and `jax_internals`. Start with `job`. `messages`, which
writes to the launcher, imports no JAX.
"""
