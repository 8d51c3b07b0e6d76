"""LLM training benchmarks in pure JAX: one recipe, one command, one number that can be trusted."""

__version__ = "0.1.0"
