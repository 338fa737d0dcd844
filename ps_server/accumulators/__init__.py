"""The user's named accumulators, as tf.compat.v1.ConditionalAccumulator has them. They know nothing of the shard and its steps.

Sums, rounds and who takes next: `rounds.py`. Names, locks, waiting and repeated calls: `registry.py`.
"""
