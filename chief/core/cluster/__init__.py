"""What a cluster is, whichever epoch it is in: each module owns one part of the state that rollbacks leave alone.

`members` knows the participants, `parameter_servers` the servers, `model` the variables and who initialises them, `data` the leased ranges,
`attachments` what contributions bring besides tensors, `settings` the policy and the optimizers, `checkpoints` what is saved and when,
`ledger` what the latest steps were made of. Must not know the `epoch`.
"""
