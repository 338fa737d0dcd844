"""The chief's decisions, pure: `Coordinator.handle(event, now)` returns instructions. No thread, lock, clock, log or wire.

`coordinator` is the entry (joining, leaving, the end of training), `messages` has the events and instructions. `epoch` is made when an
epoch begins and dropped when it ends; `cluster` outlives it; `recovery` ends one epoch and makes the next. `waiting` is the one place
where calls block, timers run and instructions collect. `report` is the status, and says what the cluster waits for; `wording` has its
words. `host` is the coordinator as its parts see it. Must not import `shards` or `serving`.
"""
