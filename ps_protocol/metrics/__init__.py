"""What each role exports for Prometheus. Knows the values that roles report; no role's state, and no port.

`exposition`: the text format, and what every process exports. `cluster`, `server` and `worker`: the families of a chief, a parameter server
and a worker. `page`: the answer to scrapes, at `/metrics`.
"""
