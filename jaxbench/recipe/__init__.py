"""The definition of a run: settings, YAML to `Run`, published rows, and counts of parameters and
FLOPs.

Imports `hardware` and `errors`, and no JAX: a recipe is read and checked on any laptop. Start with
`settings.Run`, then `recipes.resolve`.
"""
