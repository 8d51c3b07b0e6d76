"""The checks of `benchmarks/gpu.py`, in the order of what would hurt most if it were wrong.

`trains`: does it train, through the command? `operators`: is every operator right at real shapes?
`survives`: checkpoints, profiles, PGLE, compiler options. `speed`: the card's ceilings, every row
`1`, where its time goes. `choices`: settings that were chosen from compiled programs alone, A
against B. Each check is a generator of `Finding`s and runs in a process of its own; `place` says
where and with what.
"""
