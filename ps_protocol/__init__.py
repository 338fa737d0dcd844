"""What the three roles agree on: words, checks and the wire. Knows no role."""

from ps_protocol.rpc import library

# Here, because it must run before grpc is imported, and every module that imports grpc imports this package too.
library.prepare_import()
