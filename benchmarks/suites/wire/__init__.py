"""Cost and benefit of wire formats and encryption: `compression`, with `training` for its bytes and accuracy, and `tls`.

Cost of encrypted bytes by gRPC and by sockets: `tls_bytes`, which starts `tls_ends` as the receiver. Throughput of a slow link: `shaped`,
which starts `shaped_link` in network namespaces of its own.
"""
