"""`jaxbench check`: is every GPU, link, node and folder of this job as fast as it should be?

`measure` times GPUs and links, `host` asks the driver and the system, and `judge` says what is slow
and needs neither. Imports the timing of `calibrate` and `run`, the forecast's tables and the
cluster's processes. Start in `command`.
"""
