"""A worker's decisions: its next request, and its state after each answer. Pure: no call, no thread, no clock and no log.

A runner makes the calls: a session over gRPC or in this process, or a simulated worker. `worker`: joining, steps, and the end. `place`: the
participant, and registering again after chief or epoch have changed. `data`: ranges of the training data. `state`: a worker's counters and
flags. `requests`: the requests to the runner. `outcomes`: outcomes of contributions.
"""
