"""Permissions of roles, and credentials of processes. Opens no port and no channel.

`options` has the flags, `permissions` which role may call which method, `tokens` bearer tokens and their files, `certificates` TLS.
"""
