"""The suites: `step`, `wire` (formats and encryption), `server` (one server), `saving` (checkpoints), `coordination` (policies), `scale`.

A suite is a module with its arguments, its table, and its workers' code. `benchmarks/__main__.py` lists them.
"""
