"""The `lockstep` command, and clusters inside one process: the places where all roles are put together."""

import ps_protocol as ps_protocol  # before anything of it imports grpc: see own_polling there
