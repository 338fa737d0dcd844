"""A small HTTP server that each role can have beside gRPC, for browsers and for what collects metrics. Knows no role and no page.

`messages`: requests and answers as values, and which requests are refused. `server`: the port, its thread and its bounds.
"""
