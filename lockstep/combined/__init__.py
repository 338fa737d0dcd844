"""A parameter server and the chief in one process: `python -m lockstep.combined`, as `lockstep server --with-chief` runs it.

Must not decide anything: both roles are those of `ps_server` and `chief`. `__main__` parses the flags before grpc is imported; `server`
runs both roles and links the chief to the parameter server without a network.
"""
