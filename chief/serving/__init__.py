"""The chief as processes meet it: it runs the core and serves workers. Decides nothing.

`runner` puts the core, its timer and the work at the servers together; `service` has the RPCs, `server` listens.
`in_process` is the same for servers that are objects of this process. Must not know how a decision is made.
"""
