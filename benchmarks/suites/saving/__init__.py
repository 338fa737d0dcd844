"""Checkpoints: `durability` measures the cost of each setting on a cluster, `deltas` that of a delta on a large table."""
