"""Checks whether this machine, its files and its network are fit for a cluster, and says what to do if not. Changes nothing.

`findings`: results of checks, as values. `machine`: this machine. `files`: certificates and tokens. `hosts`: other machines,
and what the engine needs that has them. `kubernetes`: a cluster that kubectl reaches. `peers`: running roles.
"""
