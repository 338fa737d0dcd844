"""The chief's way to the parameter servers: carries out instructions there, and reports events. Decides nothing.

`link` is the way to one process, `standby` the same over two of them, `calls` repeats calls until there is an answer;
`requests` makes what is sent of an instruction, `work` has all servers do it; `checkpoint_store` keeps checkpoints.
Must not import `serving`, nor know a worker.
"""
