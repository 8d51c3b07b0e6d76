"""Operators: functions of arrays on the current mesh, of which models consist.

Only this package and `ssd` name kernel libraries. Start with `dense.dot`; `attention`, `quantized`
and `grouped` are registries of implementations; `blocks` applies repeated layers with an activation
stash.

Imports `mesh`, `recipe`, `hardware`, `errors`, `jax_internals`.

Dimension letters: B batch, S sequence, D embed, N heads, K kv heads, G heads of a group, H head
dim, F ffn, P part (gate, up), V vocabulary, E experts, R permuted tokens of an expert, T tokens.
"""
