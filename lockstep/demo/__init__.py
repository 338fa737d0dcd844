"""The training of `lockstep demo`: a cluster learns handwritten digits. An ordinary user of the SDK; must not know the roles' internals.

`digits` has the examples, the network and its optimizers; `worker` is the program that docker-compose.yml runs, too; `observer` measures;
`display` shows and writes files, and `live` is its table, which alone imports rich.
"""
