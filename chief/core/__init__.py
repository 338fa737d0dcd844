"""The chief's decisions, pure: `Coordinator.handle(event, now)` returns instructions. No thread, lock, clock, log or wire.

`coordinator` is the entry: a table of who handles which event. `messages` has the events and instructions. `state` is the `Cluster`, one
object that all parts hold: `joining` and `ending` (participants, training, this process), `epoch` (made when an epoch begins, dropped when
it ends), `cluster` (what outlives it), `recovery` (ends one epoch and makes the next), and `waiting`, the one place where calls block,
timers run and instructions collect. `report` is the status, with an account of the wait; `conditions` is the table of what is to be said
of a cluster and what to do; `lacking` names the workers that a step needs; `wording` has words. Must not import `shards` or `serving`.
"""
