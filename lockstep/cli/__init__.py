"""The subcommands of `lockstep`: what they are asked, and what they print. All that is about a terminal is here; nothing is decided.

Must not know how training goes on: they ask a chief, or a launcher. `up` and `demo` start clusters; `inspect` has status, why and finish;
`change` has policy and set; `local` has ls and page; `checkpoint`, `plan`, `top`, `doctor`, `trace`, `tensorboard`, `audit`, `certs` and
`health` are what they are called. `text` puts a status into words, and `screen` into the lines of `top`; both are pure. `progress` says how
far something is. `access` finds the chief. Only the module of the wanted subcommand is imported: see `lockstep/__main__.py`.
"""
