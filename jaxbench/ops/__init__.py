"""What models are made of, as functions of arrays on the current mesh. Only this wing and
`ssd` name kernel libraries.

Imports `mesh`, `recipe`, `hardware`, and the types of `xla`. Start with `dense.dot`; `attention`
and `fp8` are registries of kernels. `repeat` applies layers and keeps what their gradients need.

Dimension letters: B batch, S sequence, D embed, N heads, K kv heads, G heads of a group, H head
dim, F ffn, V vocabulary, E experts, R rows of an expert.
"""
