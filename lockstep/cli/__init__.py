"""The subcommands of `lockstep`: what they are asked, and what they print. All that is about a terminal is here; nothing is decided.

Must not know how training goes on: they ask a chief, or a launcher. `clusters` starts, changes and ends clusters; `watch` shows what a
cluster does; `files` works on what a cluster has written or needs; `advice` says what to do before a training. All share `access` (how a
command finds the chief, and fails), `formatting` (how values are written) and `progress` (how far something is). Only the module of the
wanted subcommand is imported: see `lockstep/__main__.py`.
"""
