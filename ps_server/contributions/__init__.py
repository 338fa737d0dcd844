"""Gradients that wait for their step. Knows push ids, headers and buffers; no optimizer, lock, thread or wire.

Memory for what arrives, decoding and sorting it: `staging.py`. Contributions in memory that workers share: `shared_buffers.py`. What is
open, staged, stale or repeated, and which contributions make a step: `inbox.py`.
"""
