"""One shard's numbers, and a step over them. Knows bytes, layouts and rules; no push id, lock, thread or wire.

The budget and reused buffers: `memory.py`. Variables twice with their slots: `arena.py`. Mean, optimizer, constraints and moving averages
of a step over dense variables: `apply.py`; what may take the mean's place: `trimmed.py`. Sparse variables, row by row: `tables.py`; the
first values of rows: `first_rows.py`; which row a key has in a table without a size: `key_index.py`; which rows make room in a bounded one:
`row_buckets.py`.
"""
