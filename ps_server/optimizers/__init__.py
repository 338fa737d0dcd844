"""The arithmetic of optimizers and schedules, one block of elements at a time.

Knows arrays and numbers; no variable, memory, step of a shard, lock or wire.
A formula's numbers at a step: `formulas.py`; its text is in `ps_protocol/model/optimizers.py`. Schedules, weight decay, powers and changed
settings: `rule.py`.
"""
