"""Compiler flags, and the compiled program: HLO, collectives, schedule, memory.

Imports `base` and `recipe`, but no JAX, since it reads text. Start with `hlo.Program`.
"""
