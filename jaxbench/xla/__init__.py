"""What the compiler is told, and what it made: flags, HLO, collectives, schedule, memory.

Imports `hardware`, `errors` and `recipe`, and no JAX: it reads text. Start with `hlo.Program`.
"""
