"""The parameter server: one process that holds one shard of the model. Exports nothing; it is started as `python -m ps_server`."""
