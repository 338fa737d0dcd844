"""A worker's model: the program's declarations, and the memory of its variables and gradients. Pure.

Knows names, types, layouts and bytes; no network, thread, clock or log. `declarations`: variables and tables. `optimizers`, `policies`,
`wire_format`: values that a program chooses. `memory`: arrays laid out as on the shards. `gradients`: cuts a contribution into the shards'
parts. `user_state`: the state that a program keeps with the training. `gradient_memory`: chooses the memory for the next gradients.
"""
