"""The parameter server: one process that holds one shard of the model. Exports nothing; it is started as `python -m ps_server`."""

import ps_protocol as ps_protocol  # before anything of it imports grpc: see own_polling there
