"""A participant's part in the training, from registration to leaving.

Knows the seams to chief and shards; no transport, no command line, and nothing of the original's API.
`session`: what a worker's program calls. `observer`: the same for those who only read. `training`: one worker's loop over the steps.
`membership`: its place in the cluster. `joining`: the way to the model. `reading`: what can be read. `data`: ranges of the training data.
"""
