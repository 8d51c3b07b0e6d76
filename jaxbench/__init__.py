"""LLM training benchmarks in pure JAX: one recipe, one command, one number that can be trusted.

Each package says in its docstring what it holds; `tests/test_layering.py` says what it may import.
"""

__version__ = "0.1.0"
