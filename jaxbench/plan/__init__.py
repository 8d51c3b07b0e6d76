"""The trainer's own program for GPUs that are not there: memory, traffic, work, least time.

Imports `train` and below, never `run`. Start with `plan.make_plan`; the command is `planning`'s.
"""
