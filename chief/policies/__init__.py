"""Coordination policies: which workers contribute to a step, when it is complete, and which workers may continue.

Pure, and the lowest of the chief's layers: no leases, calls, clocks, threads or wire. `base` is the seam that all of them implement,
`factory` makes the policy of a configuration; `sync` and `fifo` are synchronous steps, `ordered` is ssp and async, `unlocked` is async
without a lock.
"""
