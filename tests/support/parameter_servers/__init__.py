"""Parameter servers under test: shards of every transport, what is staged on them, and their checkpoints. Asserts nothing."""
