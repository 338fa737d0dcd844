"""The API of tf.compat.v1.train, on top of a session: graph, optimizers, SyncReplicasOptimizer, monitored sessions, hooks.

Knows sessions as their users do; no server and no transport.
`graph`: what is declared and run. `optimizers`: the ten, and what applies gradients. `replicas_optimizer`: SyncReplicasOptimizer.
`session`: MonitoredTrainingSession. `hooks` and `saving`: the ready-made hooks. `averages`: ExponentialMovingAverage.
"""
