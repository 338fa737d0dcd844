"""Weights for followers: a shard's variables as words of 16 bits, what changes of them between two steps, and what proves a copy.

`words`: where each slice lies, differences and their bytes, digests. `versions`: the newest copy of a shard with the patches that led to
it, as servers and relays answer from it. `copy`: a reader's copy, which patches bring forward. Knows layouts and bytes; no message, no
clock, no thread.
"""
