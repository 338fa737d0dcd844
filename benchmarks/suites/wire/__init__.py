"""What a wire format or encryption saves and costs: `compression`, with `training` for its bytes and accuracy, and `tls`.

What encrypted bytes cost by gRPC and by sockets: `tls_bytes`, which starts `tls_ends` as the receiver.
What gets over a slow link: `shaped`, which starts `shaped_link` in network namespaces of its own.
"""
