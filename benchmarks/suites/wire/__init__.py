"""Cost and benefit of wire formats and encryption: `compression`, with `training` for its bytes and accuracy, and `tls`.

Throughput of a slow link: `shaped`, which starts `shaped_link` in network namespaces of its own.
"""
