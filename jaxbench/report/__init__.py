"""Results of runs, ours and the published scripts', next to the published rows: `python -m
jaxbench.report`. It runs on a laptop, without JAX.

Imports `results`, `pages`, `recipe` and `base`. `runs` has the data of a run, which `folders` and
`logs` read. `compare` compares two sets of runs, and `history` compares runs over time.
`named` has what people see of a run: its name, its figures (`formats`), and what is wrong with it
(`gap`). `terminal` prints it; `page` with its `sections` renders HTML. `figures` has the published
table. `command` is the command line.
"""
