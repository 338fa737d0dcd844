"""A worker's model: what a program declares, and the memory that its variables and gradients lie in. Pure.

Knows names, types, layouts and bytes; no network, thread, clock or log.
`declarations`: variables and tables. `optimizers`, `policies`, `wire_format`: values to ask for. `memory`: arrays as the shards have them.
`gradients`: from what is pushed to each shard's part. `user_state`: what a program keeps with
the training. `gradient_memory`: which memory the next gradients are written into.
"""
