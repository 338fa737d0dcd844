"""One parameter server: `apply` its optimizers, `memory` what it takes, `sparse_table` a few rows of a large table."""
