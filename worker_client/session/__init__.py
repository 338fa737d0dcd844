"""A participant's part in the training, from registration to leaving: carries out the requests of `worker_client/core`.

Knows the seams to chief and shards; no transport, no command line, and nothing of the original's API. `session`: what a worker's program
calls. `observer`: the same for a participant that only reads. `calls`: a worker's calls of the chief. `training`: its shards and memory at
one place. `membership`: its lease and its connections. `reading`: reading the model. `changes`: changes of a running cluster. `spans`:
OpenTelemetry's spans of steps. `exporting`: the worker's own `/metrics`.
"""
