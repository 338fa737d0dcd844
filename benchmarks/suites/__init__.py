"""The suites: `step`, `wire` (formats and encryption), `server` (one server), `fresh` (followers), `saving`, `coordination`, `scale`.

A suite is a module with its arguments, its table, and its workers' code. `benchmarks/__main__.py` lists them.
"""
