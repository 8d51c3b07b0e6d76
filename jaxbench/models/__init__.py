"""One decoder for all families, as NNX modules that are used as plain pytrees.

Imports `experts`, `ssd`, `ops`, `mesh` and `recipe`; knows no Run, optimizer, file or environment
variable. Start with `decoder.Decoder`. A *mixer* is what a symbol of the layer
pattern stands for: attention, a feed-forward layer, experts, Mamba-2 (`decoder.MIXERS`).
"""
