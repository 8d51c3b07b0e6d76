"""Compiler flags, and the compiled program: HLO, collectives, schedule, memory.

Imports `hardware`, `errors` and `recipe`, and no JAX: it reads text. Start with `hlo.Program`.
"""
