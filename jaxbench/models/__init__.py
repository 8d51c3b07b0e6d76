"""One decoder for all families, as NNX modules that are used as plain pytrees.

Start with `decoder.Decoder.loss`, then read `context`. A *mixer* is what one letter of the layer
pattern stands for: attention, a feed-forward layer, experts, or Mamba-2 (`decoder.MIXERS`).

A *layer* of a block is a mixer with its norm and residual. A recipe counts layers as published: two
mixers in a transformer.

Imports `ops`, `mesh`, `recipe` and `base`. It knows no Run, optimizer, file or environment
variable.
"""
