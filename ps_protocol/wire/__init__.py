"""Values to messages and back. Knows protobuf; no gRPC, no socket, no thread.

`codec` has `encode` and `decode`. `pairs` lists which value is which message: `generator` makes `coders` of it, with the functions of
`fields`, and `special` has what differs. `chief_calls` lists what the chief can be asked. `frames` frames tensors so that a payload is
copied once; `call_errors` has errors within streams. The generated messages are in `ps_protocol.v1`, made from `protos/`.
"""
