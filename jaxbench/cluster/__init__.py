"""Many processes as one job: joining, collective decisions, signals, heartbeat, watchdog.

Imports `errors`, `files` and `jax_internals`. Start with `job`; `heartbeat`, `watchdog` and
`messages` to the launcher import no JAX.
"""
