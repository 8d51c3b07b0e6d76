"""The trainer's own program for GPUs that are not there: memory, traffic, work, least time.

Imports `train` and below, never `run`. Start with `command.main`, then `plan.make_plan`.
"""
