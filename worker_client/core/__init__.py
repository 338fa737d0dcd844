"""What a worker decides: what it asks next, and what follows from each answer. Pure: no call, no thread, no clock and no log.

Knows values only; who runs it makes the calls: a session over gRPC or in this process, or a simulated worker.
`worker`: the way from joining over the steps to the end. `place`: who the worker is, also after chief or epoch have changed. `data`: ranges
of the training data. `state`: where a worker stands. `requests`: what is asked. `outcomes`: what became of contributions.
"""
