"""Values to messages and back. Knows protobuf; no gRPC, no socket, no thread.

`codec` has every message but the tensors'; `frames` has those, framed by hand so that a payload is copied once. The generated messages
are in `ps_protocol.v1`, made from `protos/`.
"""
