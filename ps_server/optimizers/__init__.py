"""The arithmetic of optimizers and schedules, one block of elements at a time.

Knows arrays and numbers; no variable, memory, step of a shard, lock or wire.
Schedules, weight decay, powers and changed settings: `rule.py`. The formulas are in `ps_protocol/model/optimizers.py`, their numbers at a
step in `ps_protocol/model/optimizer_formulas.py`.
"""
