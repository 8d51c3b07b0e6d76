"""`jaxbench check`: is every GPU, link, node and folder of this job as fast as it should be?

`measure` times GPUs and links, `host_facts` asks driver and system, `judge` says what is slow and
needs neither. Imports `cluster` for the processes and the timing, and the forecast's tables;
`qualify` also `pages` and `report`. Nothing of the trainer. Start in `command`.
"""
