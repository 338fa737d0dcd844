"""Checkpoints as files: written, read, found and removed. Knows storages; no RPC, no step of a living cluster.

`tensor_file` is one file, `manifest` what makes a checkpoint whole, `storage` and `fsspec_storage` where they are kept, `catalog` which
there are.
"""
