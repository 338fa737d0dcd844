"""What `lockstep demo` shows: a cluster that learns handwritten digits. An ordinary user of the SDK; must not know the roles' insides.

`digits` has the examples, the network and its optimizers; `worker` is the program that docker-compose.yml runs, too; `observer` measures;
`display` shows and writes files, and `live` is its table, which alone imports rich.
"""
