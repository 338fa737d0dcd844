"""Parameter servers under test: shards of every transport, contributions staged on them, and their checkpoints. Asserts nothing."""
