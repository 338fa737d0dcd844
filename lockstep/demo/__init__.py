"""The training of `lockstep demo`: a cluster learns handwritten digits. An ordinary user of the SDK; must not know the roles' internals.

`digits` has the examples, the network and its optimizers; `worker` is the program, which docker-compose.yml runs, too.
"""
