"""Commands that say what to do before a training: `plan` (how many backup workers pay off) and `doctor` (whether this machine is fit).

Must not know how that is found out: `lockstep/planning` and `lockstep/doctor` do.
"""
