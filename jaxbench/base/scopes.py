"""Names by which plans and checks find in a compiled program what operators compute."""

SCAN = "ssd.scan"
"""Part of the scope of every kernel of the Mamba-2 scan."""

QUANTIZED = "quantized."
"""The scope of a quantized matmul, and of what makes its operands, begins with this. The name of
the weight follows."""

HADAMARD = "hadamard"
"""The scope of Hadamard transforms, which are not part of the matmul in whose scope they are."""

TRITON = "__gpu$xla.gpu.triton"
"""The target of the custom calls that Pallas kernels compile to."""

ALLOCATES = "AllocateBuffer"
"""The target of the custom call that allocates an uninitialised buffer. It runs no kernel."""
