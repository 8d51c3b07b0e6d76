"""Many processes as one job: joining, collective decisions, signals, heartbeat, watchdog.

Imports `errors`, `files` and `jax_internals`. Start with `job`; `heartbeat` and `watchdog` import
no JAX.
"""
