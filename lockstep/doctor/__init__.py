"""Whether this machine, its files and its network are fit for a cluster, and what to do where they are not. Changes nothing.

`findings`: what a check has found, as values. `machine`: this machine. `files`: certificates and tokens. `peers`: running roles.
`link`: time and bandwidth between two hosts, with `lockstep doctor --serve` at the other end.
"""
