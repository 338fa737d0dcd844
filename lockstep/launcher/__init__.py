"""A cluster on this machine: its processes, from the first to the last. Must not know steps, tensors or the terminal.

`spec` says what is asked for; `cluster` which processes that makes; `supervisor` starts and ends them, with `guardian` and `guarded_exec`
for its own death, and `orphans` for what processes leave behind; `repeated` shows what
all workers print once; `failures`
judges what the end of one means; `watch` asks the chief, and alone imports NumPy and grpc.
"""
