"""What everything else stands on: errors, files, the terminal, GPUs, versions. Imports nothing of
the other packages, and no JAX.
"""
