"""The definition of a run: settings, the way from YAML to `Run`, published rows, and counts of
parameters and FLOPs.

Imports `base`, and no JAX: any laptop can read and check a recipe. Start with `settings.Run`, then
`recipes.resolve`. `listing` is the command `jaxbench list`.
"""
