"""What the three roles agree on: words, checks and the wire. Knows no role."""

from ps_protocol.rpc import library

# Here, since it is to be before anybody imports grpc, and whoever does imports something of this package as well.
library.prepare_import()
