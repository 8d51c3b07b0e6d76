"""Results of runs, ours and those of the published scripts, beside the published rows: `python -m
jaxbench.report`. On a laptop: no JAX.

Imports `recipe`, `hardware`, `errors` and `files`. `found` says what is known of a run, `folders`
and `logs` read it, `compare` sets two against each other, `formats` shows them, `command` is the
command line.
"""
