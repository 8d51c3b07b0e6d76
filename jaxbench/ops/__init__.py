"""Operators: functions of arrays on the current mesh. Models are built from them.

Only this package and `jax_internals` name kernel libraries. Start with `dense.dot`. `attention`,
`quantized`, `grouped` and `ssd` (Mamba-2) each hold a registry of implementations. `moe` routes and
dispatches tokens. `layer_stack` applies repeated layers and keeps their activations in a stash.

Imports `mesh`, `recipe`, `base`, `jax_internals`.

Dimension letters: B batch, S sequence, D embed, N heads, K kv heads, G heads of a group, H head
dim, h half of the rotated features, F ffn, P part (gate, up), L latent, V vocabulary, E experts, R
permuted tokens of an expert, T tokens, C chunks of tokens, Q queries of a block. `ssd` has its own.
"""
