"""What surrounds the training: the command, one session, records, checkpoints, profiles.

Imports `train`, `cluster` and below. Start with `command.main`, then `session.benchmark`;
the options are in `arguments`, which needs no JAX.
"""
