"""One shard as many threads see it: the one lock, and what is under way. Knows threads; no message and no RPC.

Who may call, and whose turn it is: `gate.py`. Every call of a worker or a chief: `shard.py`. A push, a creation or a reading under way:
`handles.py`. Variables encoded once for all readers: `encoded_variables.py`; for followers, with what changes: `followed.py`. Memory that
workers of the same host share: `sharing.py`. Saving and restoring: `checkpoints.py`. Files for rows of
tables: `table_files.py`.
"""
