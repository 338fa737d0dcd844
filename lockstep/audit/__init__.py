"""Whether a cluster did what it promised, from the files that it wrote with --history. Must not know a cluster, or the network.

`facts` sorts what was written; `books` checks each contribution's way into a step, or none; `values` computes all variables again from
the contributions, and compares.
"""
