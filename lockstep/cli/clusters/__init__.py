"""Commands that start, change and end a cluster.

`up` runs a user's program on a cluster of this machine, and `demo` a built-in training; `kubernetes` writes manifests, `systemd` units;
`relay` passes the weights of a cluster on; `change` has `policy`, `set` and `finish`. The processes themselves belong to
`lockstep/launcher`, the manifests to `lockstep/kubernetes`.
"""
