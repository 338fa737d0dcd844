"""Finds by simulation how many backup workers pay off. Pure: knows no thread, clock, network, file or terminal.

`latencies`: distributions of computing times; `times`: measured computing times; `simulation`: the chief's own coordinator in simulated
time; `plan`: compares several simulations. `lockstep/cli/advice/plan.py` prints the result.
"""
