"""The command of `python -m jaxbench.plan`: one plan, all of them, how a recipe scales, or a search
among meshes.

Imports `plan` and below. Start with `command.main`; `processes` makes plans in processes of their
own and keeps them, for `sweep`, `scaling` and `search`.
"""
