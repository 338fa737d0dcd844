"""One shard's part of a model: its numbers and its contributions together. Knows steps; no epoch's callers, lock, thread, clock or wire.

How a step is prepared, applied and counted: `shard_model.py`. All that the next steps depend on, for a checkpoint: `snapshot.py`.
"""
