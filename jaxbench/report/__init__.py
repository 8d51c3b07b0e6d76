"""Results of runs, ours and those of the published scripts, beside the published rows: `python -m
jaxbench.report`. On a laptop: no JAX.

Imports `recipe`, `hardware`, `errors` and `files`. `found` says what is known of a run, `folders`,
`logs` and `plans` read it, `compare` sets two against each other and `history` those of many dates,
`formats` shows them as text; `page` is the page, with its `sections` and their `charts`; `command`
is the command line.
"""
