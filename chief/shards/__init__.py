"""The chief's way to the parameter servers: carries out instructions there, and reports events. Decides nothing.

`work` has one coroutine an instruction, which knows no event loop; `side` runs them on one. `link` is the way to one process, `standby` the
same over two of them, `calls` repeats calls until there is an answer; `checkpoint_store` keeps checkpoints. Must not import `serving`, nor
know a worker.
"""
