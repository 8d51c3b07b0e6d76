"""LLM training benchmarks in pure JAX: one recipe, one command, one number that can be trusted.

The table in CONTRIBUTING.md says what each package holds and may import.
"""

__version__ = "0.1.0"
