"""Many processes as one job: joining, its devices, collective decisions, timing of each GPU and
link, signals, the watchdog, and how a process ends.

Imports `base` and `jax_internals`. Start with `job`. `nvml`, `telemetry` and the command `jobs`
import no JAX.
"""
