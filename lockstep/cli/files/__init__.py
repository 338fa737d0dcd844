"""Commands that work on the files of a cluster: `checkpoint`, `audit` (the history of a training) and `certs`.

Must not know the formats: they belong to `ps_protocol/checkpoint`, `lockstep/audit` and `lockstep/certs.py`.
"""
