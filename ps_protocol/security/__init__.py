"""Who may do what, and how a process proves who it is. Opens no port and no channel.

`options` has the flags, `permissions` which role may call which method, `tokens` bearer tokens and their files, `certificates` TLS.
"""
