"""Values to messages and back. Knows protobuf; no gRPC, no socket, no thread.

`codec` has `encode` and `decode`. `pairs` lists which value is which message, but for requests, which name their RPC: `generator` makes
`coders` of all, with the functions of `fields`, and `special` has what differs. `frames` frames tensors so that a payload is copied once;
`call_errors` has errors within streams. The generated messages are in `ps_protocol.v1`, made from `protos/`.
"""
