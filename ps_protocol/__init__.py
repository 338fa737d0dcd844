"""The words, checks and wire format that the three roles share. Knows no role."""

from ps_protocol.rpc import library

# Here, because it must run before grpc is imported, and every module that imports grpc imports this package too.
library.prepare_import()
