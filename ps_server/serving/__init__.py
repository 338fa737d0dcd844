"""How a parameter server is reached: messages to calls of the shard, and back. Decides nothing.

Calls: `calls.py`. Long-lived streams of workers and chief: `streams.py`. The same shard in the caller's own process: `local.py`.
"""
