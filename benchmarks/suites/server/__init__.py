"""One parameter server: `apply` measures its optimizers, `memory` its memory, `sparse_table` a few rows of a large table."""
