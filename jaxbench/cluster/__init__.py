"""Many processes as one job: joining, collective decisions, signals, heartbeat, watchdog.

Imports `errors` and `files`. Start with `job`; `heartbeat` and `watchdog` import no JAX.
"""
