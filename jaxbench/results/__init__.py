"""What the steps of a run amount to: the window that counts, rates, and the verdict next to the
published row. `plans` and `profiled` are records that `jaxbench plan` stores and reports read.
Imports `recipe` and `base`.
"""
