"""A participant's part in the training, from registration to leaving: carries out what `worker_client/core` asks for.

Knows the seams to chief and shards; no transport, no command line, and nothing of the original's API. `session`: what a worker's program
calls. `observer`: the same for those who only read. `calls`: a worker's calls of the chief. `training`: its shards and memory at one
place. `membership`: its lease and its connections. `reading`: what can be read. `changes`: what may be changed in a running cluster.
`spans`: OpenTelemetry's spans of steps. `exporting`: the worker's own `/metrics`.
"""
