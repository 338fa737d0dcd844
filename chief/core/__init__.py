"""The chief's decisions, pure: `Coordinator.handle(event, now)` returns instructions. No thread, lock, clock, log or wire.

`coordinator` is the entry, `messages` has the events and instructions. Of an epoch: `recovery` says how it begins, `training`
what happens in it, `ending` how it ends, `checkpoints` what is saved of it, `settings` what is changed in it.
What they rest on: `members`, `model`, `data`, `parameter_servers`, `ledger`, `waiting` (blocked calls and deadlines).
`explain` says in words what the cluster waits for. Must not import `shards` or `serving`.
"""
