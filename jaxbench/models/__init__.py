"""One decoder for all families, as NNX modules that are used as plain pytrees.

Start with `decoder.Decoder.loss`, then read `context`. A *mixer* is what one letter of the layer
pattern stands for: attention, a feed-forward layer, experts, or Mamba-2 (`decoder.MIXERS`).

Imports `ops`, `mesh` and `recipe`. It knows no Run, optimizer, file or
environment variable.
"""
