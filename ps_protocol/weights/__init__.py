"""Weights for followers: a shard's variables as words of 16 bits, what changes of them between two steps, and what proves a copy.

`words`: where each slice lies, patches and their bytes, digests. `copy`: a copy of a shard's words, which steps bring forward, and which
answers those who follow it: a server's, a relay's, a reader's. Knows layouts and bytes; no message, no clock, no thread.
"""
