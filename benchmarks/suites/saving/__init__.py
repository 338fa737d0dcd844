"""Checkpoints: `checkpoint` what a save costs one parameter server, `durability` what each setting costs a cluster."""
