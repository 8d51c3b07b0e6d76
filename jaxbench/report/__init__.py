"""Results of runs, ours and the published scripts', next to the published rows: `python -m
jaxbench.report`. It runs on a laptop, without JAX.

Imports `results`, `recipe` and `base`. `runs` has the data of a run, which `folders`,
`logs` and `plans` read. `compare` compares two sets of runs, and `history` compares runs over time.
`formats` renders text; `page` with its `sections` and `charts` renders HTML. `command` is the
command line.
"""
