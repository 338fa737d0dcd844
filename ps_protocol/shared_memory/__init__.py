"""The transport between processes of one host: nothing travels but references. Knows pages and descriptors; no gradient's meaning.

`segment` is the memory and what lies where in it, `words` are numbers in it that two processes read, `buffers` a worker's room for
gradients, `variables` what a worker reads. How a worker comes to it, and what it carries: `ps_protocol/rpc/memory.py`.
"""
