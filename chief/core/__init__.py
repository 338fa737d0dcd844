"""The chief's decisions, pure: `Coordinator.handle(event, now)` returns instructions. No thread, lock, clock, log or wire.

`coordinator` is the entry (joining, leaving, the end of training), `messages` has the events and instructions. `epoch` is made when an
epoch begins and dropped when it ends; `cluster` outlives it; `recovery` ends one epoch and makes the next. `waiting` is the one place
where calls block, timers run and instructions collect. `conditions` is the table of what is to be said of a cluster and what to do, of a
`situation`; `report` is the status, with an account of the wait; `wording` has words. `host` is the coordinator as its parts see it. Must
not import `shards` or `serving`.
"""
