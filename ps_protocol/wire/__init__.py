"""Values to messages and back. Knows protobuf; no gRPC, no socket, no thread.

`codec` has the list of all pairs and `encode` and `decode`; `fields` compiles a pair, `special` has what differs, and `step` the messages
of every step by hand. `chief_calls` lists what the chief can be asked. `frames` frames tensors so that a payload is copied once;
`call_errors` has errors within streams. The generated messages are in `ps_protocol.v1`, made from `protos/`.
"""
