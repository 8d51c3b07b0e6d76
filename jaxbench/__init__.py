"""LLM training benchmarks in pure JAX: one recipe, one command, one number that can be trusted.

The wings, lowest first: `recipe`, `xla`, `ops`, `models`, `train`, `cluster`, `run`, `plan`; the
table in CONTRIBUTING.md says what each holds and may import.
"""

__version__ = "0.1.0"
