"""The parts of a process that concern its machine: options, waiting, listening, logs, history, memory, faults on request. Knows no call.

`options` is the table of all flags and variables, `exit_codes` of how a process ends; `ending` has the signals that ask a role to.
`waiting` has conditions, retries and deadlines, `listening` addresses to listen at, `local_clusters` the clusters that launchers run on
this machine, `descriptors` the sockets that gRPC has opened, `history` the records for `lockstep audit`, `failpoints` faults for tests,
`exhaustion` what happens without memory, `logs` a role's log and warnings that strangers can cause, `event_file` the files that TensorBoard
reads, `output` text for a stream that may have no reader, `memory` what the C library and the garbage collector do with memory, `polling`
how gRPC's library is loaded, `tf_config` the environment variable TF_CONFIG.
"""
