"""The subcommands of `lockstep`: their arguments and their output. Knows terminals; decides nothing.

Must not know how training works: they ask a chief, or a launcher. `clusters` starts, changes and ends clusters; `watch` shows what a
cluster does; `files` works on what a cluster has written or needs; `advice` says what to do before a training. `commands` is
the table of all. They share `results` (what a command returns, or fails with), `access` (finding the chief), `formatting` (values as text)
and `progress` (of long work). Only the module of the requested command is imported: see `lockstep/__main__.py`.
"""
