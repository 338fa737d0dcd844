"""Sockets that carry tensors beside gRPC, so that this process copies no byte. Knows connections and bytes; no gRPC, no message.

`data_socket`: one connection, and a payload on it, from either end. `listener`: where a server takes such connections.
"""
