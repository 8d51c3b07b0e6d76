"""`jaxbench report`: results of runs, ours and those of published scripts, next to the published
rows. It runs on a laptop, without JAX.

Imports `results`, `pages`, `recipe` and `base`. Start in `command`. `runs` has the data of a run,
which `folders` and `logs` read. `compare` compares two sets of runs, `history` runs over time, and
`gpus` the GPUs of a run. `named` has what people see of a run: its name, its figures (`formats`),
and what is wrong with it (`gap`). `terminal` prints it; `page` with its `sections` renders HTML.
"""
