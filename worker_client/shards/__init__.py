"""The parameter servers of a model as a worker uses them.

Knows shards by their seam, and memory; no chief's answers, no step's meaning and no transport.
`shards`: all at once: push, read, create, share memory, and counting what travels. `standbys`: one shard that several processes hold.
"""
