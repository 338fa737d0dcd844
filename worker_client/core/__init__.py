"""A worker's decisions: its next request, and its state after each answer. Pure: no call, no thread, no clock and no log.

Its runner makes the calls: a session over gRPC or in this process, or a simulated worker. `worker`: from joining over the steps to the
end. `place`: the participant, also after chief or epoch have changed. `data`: ranges of the training data. `state`: where a worker stands.
`requests`: the requests to the runner. `outcomes`: outcomes of contributions.
"""
