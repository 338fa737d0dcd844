"""Checkpoints: `checkpoint` measures the cost of a save on one parameter server, `durability` that of each setting on a cluster."""
