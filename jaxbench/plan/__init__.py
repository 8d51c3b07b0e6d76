"""`python -m jaxbench.plan`: the trainer's program, compiled for absent GPUs and described.

Imports `train` and below, never `run`. Start with `plan.make_plan`, or with `command.main`.
"""
