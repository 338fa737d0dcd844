"""A participant's part in the training, from registration to leaving: the two sides of `worker_client/core`, and what programs call.

Knows the seams to chief and shards; no transport, no command line, and nothing of the original's API. `session`: what a worker's program
calls. `observer`: the same for a participant that only reads. `common`: what both have. `membership`: a participant's lease and
connections, and the chief's side of the core. `calls`: the worker's own side. `training`: its shards and memory at one place. `reading`:
reading the model. `changes`: changes of a running cluster. `spans`: OpenTelemetry's spans of steps. `exporting`: the worker's own
`/metrics`.
"""
