"""Commands for the time before a training: `plan` (how many backup workers pay off) and `doctor` (whether this machine is fit).

Must not know the methods: they belong to `lockstep/planning` and `lockstep/doctor`.
"""
