"""How a participant reaches its cluster: the chief, and the ways to call.

Knows no model, no step and no session.
`transport`: how chiefs and shards are opened, over gRPC or in this process. `chief`: asking it, and finding it again. `threads`: calls
that may hang, calls at once.
"""
