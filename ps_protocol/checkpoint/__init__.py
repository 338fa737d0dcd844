"""Checkpoints as files: written, read, found and removed. Knows storages; no RPC, no step of a running cluster.

`tensor_file` is one file, `manifest` lists the files of a checkpoint, `storage` and `fsspec_storage` are the places for checkpoints,
`catalog` opens the storage of a place and finds the checkpoints in it, `trial` finds out whether a place can be used.
"""
