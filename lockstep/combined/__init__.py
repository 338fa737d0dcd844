"""A parameter server and the chief in one process: `python -m lockstep.combined`, as `lockstep server --with-chief` runs it.

Must not decide anything: both roles are those of `ps_server` and `chief`. `__main__` understands the flags, before grpc is imported;
`server` runs the two, and is the chief's link to a parameter server without a wire.
"""
