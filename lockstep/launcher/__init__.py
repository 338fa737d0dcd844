"""Runs the processes of a cluster, here or on other hosts. Must not know steps, tensors or the terminal.

`spec`: the specification of a cluster. `cluster`: its processes. `hosts` places them, `gpus` says which GPUs each worker has; `remote`
stands here for one elsewhere, which an `agent` runs there; `looks` asks hosts beforehand. `program` says what a worker's command lacks.
`supervisor` starts and ends processes; `guardian` and `guarded_exec` end them if the supervisor is killed. `failures` decides what the
end of a process means. `watch` polls the chief, and alone imports NumPy and grpc.
"""
