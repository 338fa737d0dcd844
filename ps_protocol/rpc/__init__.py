"""gRPC, all of it: no other module imports grpc before this package does. Knows no step and no decision.

`shard`, `chief`, `accumulators` and `board` are the roles behind gRPC as workers have them, `commands` is what a chief asks of a parameter
server with every step; they stand on `client` and `client_stream`. `payloads` decides what goes over data sockets instead, and `memory`
what lies in memory that is shared. Servers stand on
`server`: each call comes through the `door`, past `admission`, and is served as a `server_stream` is; `strangers` bounds traffic that
belongs to no admitted call. `channel` has every option, `status` errors as statuses.
"""

from ps_protocol.process import polling

# Here, because all that imports grpc imports this package first.
polling.load_grpc()
