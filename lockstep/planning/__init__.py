"""How many backup workers pay, found by simulation. Pure: knows no thread, clock, network, file or terminal.

`latencies`: how long workers compute; `trace`: such times, measured; `simulation`: the chief's own coordinator with a clock that is a
number; `plan`: several simulations, compared. `lockstep/cli/advice/plan.py` puts the result into words.
"""
