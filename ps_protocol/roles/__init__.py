"""The calls of each role, as Protocols and values, whatever carries them. Pure; knows no transport and no thread.

`request` is what a request says of itself: its RPC, who may ask, and the type of its answer. `shard` is a parameter server, `chief` the
chief, `contribution` what one is called and what it brings besides tensors, `fence` shows when and by whom something is said (eras,
fences, session secrets), `accumulators` is the holder of named accumulators, `board` that of posts, `weights` what followers of weights
ask for, `checkpoint` what is saved of a cluster, `identity` who answers at an address and with which version of the protocol, `history`
what each role writes down for `lockstep audit`.
"""
