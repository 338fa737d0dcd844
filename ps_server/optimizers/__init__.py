"""The arithmetic of optimizers and schedules, one block of elements at a time.

Knows arrays and numbers; no variable, memory, step of a shard, lock or wire.
A formula's operations, slots and constants, also of one that is a text: `formulas.py`. Schedules, weight decay, powers and
changed settings: `rule.py`.
Never change the order of operations in a formula: the bits are promised.
"""
