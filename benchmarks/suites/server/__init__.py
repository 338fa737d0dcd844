"""One parameter server: `apply` its optimizers, `memory` its memory, `sparse_table` a few rows of a large table."""
