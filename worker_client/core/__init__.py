"""A worker's decisions: what it asks next, and its state after each answer. Pure: no call, no thread, no clock and no log.

Coroutines, which call two sides: those of a session over gRPC or in this process, or those of a simulated worker. `worker`: joining, steps,
and the end. `place`: the participant, and registering again after chief or epoch have changed. `data`: ranges of the training data.
`state`: a worker's counters and flags. `sides`: the calls. `outcomes`: outcomes of contributions.
"""
