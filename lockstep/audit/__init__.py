"""Checks from the files written with --history that a cluster kept its promises. Must not know a running cluster, or the network.

`facts` sorts the records; `books` checks which step each contribution is part of, if any; `values` recomputes all variables from
the contributions, and compares.
"""
