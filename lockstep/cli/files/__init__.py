"""Commands that work on the files of a cluster: `checkpoint`, `store` (its weights, for followers), `audit` (its history) and `certs`.

Must not know the formats: they belong to `ps_protocol/checkpoint`, `worker_client/following`, `lockstep/audit` and `lockstep/certs.py`.
"""
