"""Results of runs, ours and the published scripts', next to the published rows: `python -m
jaxbench.report`. It runs on a laptop, without JAX.

Imports `results`, `pages`, `recipe` and `base`. `runs` has the data of a run, which `folders` and
`logs` read. `compare` compares two sets of runs, and `history` compares runs over time. `formats`
renders text; `page` with its `sections` renders HTML. `command` is the command line.
"""
