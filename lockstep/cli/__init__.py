"""The subcommands of `lockstep`: their arguments, and what they print. Everything about terminals is here; nothing is decided.

Must not know how training works: they ask a chief, or a launcher. `clusters` starts, changes and ends clusters; `watch` shows what a
cluster does; `files` works on what a cluster has written or needs; `advice` says what to do before a training. All share `access` (how a
command finds the chief, and fails), `formatting` (how values are written) and `progress` (of long work). Only the module of the wanted
subcommand is imported: see `lockstep/__main__.py`.
"""
