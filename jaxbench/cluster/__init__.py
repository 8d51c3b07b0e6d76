"""Many processes as one job: joining, agreeing, stopping together, and noticing a lost one.

Imports `errors` and `files`. Start with `job`; `heartbeat` and `watchdog` import no JAX.
"""
