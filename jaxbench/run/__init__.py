"""The command `train` around the training loop: options, records, checkpoints, profiles.

Imports `train`, `cluster` and below. Start with `command.main`, then `session.benchmark`;
`arguments` needs no JAX.
"""
