"""Manifests for Kubernetes that run a user's program as the workers of a cluster. Decides what is in them; talks to no Kubernetes.

`spec` checks what a user asks for, `objects` makes the objects of the API from it, `head` the commands to start and reach the cluster,
`chart` the files of a chart of Helm, and `yaml_text` text for people to read. Must not know terminals or files:
`lockstep/cli/clusters/kubernetes.py` does.
"""
