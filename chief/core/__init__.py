"""The chief's decisions, pure: `Coordinator.handle(event, now)` returns instructions. No thread, lock, clock, log or wire.

`coordinator` is the entry (who comes and goes, how training ends), `messages` has the events and instructions. What belongs to one epoch
is `training`; `recovery` makes it anew when another begins. `waiting` is the one place where calls block, timers run and instructions
collect. What outlives an epoch: `members`, `model`, `data`, `parameter_servers`, `ledger`, `settings`, `checkpoints`; `answers` waits to
be certain; `step_numbers` are hyper-parameters that contributions bring. `report` is the status, and says what the cluster waits for;
`wording` has its words. `host` is the coordinator as these parts see it. Must not import `shards` or `serving`.
"""
