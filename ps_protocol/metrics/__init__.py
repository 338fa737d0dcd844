"""The metrics that each role exports for Prometheus. Knows the values that roles report; no role's state, and no port.

`families`: those of a chief, a parameter server and a worker. `exposition`: the text format, the families of every process, and the answer
at `/metrics`.
"""
