"""One shard's numbers, and a step over them. Knows bytes, layouts and rules; no push id, lock, thread or wire.

The budget and reused buffers: `memory.py`. Variables twice with their slots: `arena.py`. Mean, optimizer, constraints and moving averages
of a step over dense variables: `apply.py`; what may take the mean's place: `trimmed.py`. Sparse variables, row by row: `tables.py`; their
gradients: `row_gradients.py`; the first values of rows: `first_rows.py`. Which keys of a table without a size have rows: `keyed_rows.py`,
with the index (`key_index.py`), the rows that make room (`row_buckets.py`) and counts of keys that wait (`occurrences.py`).
"""
