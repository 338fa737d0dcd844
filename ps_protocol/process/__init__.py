"""What any process of a cluster does with its machine: it waits, listens, keeps memory and a history, and fails on purpose. Knows no gRPC.

`options` is the table of all flags and variables. `waiting` has conditions, retries and deadlines, `listening` addresses to listen at,
`local_clusters` which clusters launchers run on this machine, `descriptors` the sockets that gRPC has, `history` the records for
`lockstep audit`, `failpoints` faults that tests want, `logs` a role's log and warnings that strangers can cause, `event_file` the files
that TensorBoard reads, `output` text that perhaps nobody reads, `memory` what the C library and the garbage collector do with memory,
`tf_config` the environment that cluster engines give.
"""
