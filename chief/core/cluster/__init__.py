"""The state of a cluster that outlives epochs: each module owns one part, which rollbacks leave alone.

`members` knows the participants, `parameter_servers` the servers, `model` the variables and the worker that initialises them, `data` the
leased ranges, `attachments` what contributions bring besides tensors, `settings` the policy and the optimizers, `checkpoints` what is
saved and when, `ledger` the contributions of the latest steps. Must not know the `epoch`.
"""
