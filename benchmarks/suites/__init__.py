"""What is measured: `step`, `wire` (what travels), `server` (one of them), `saving` (checkpoints), `coordination` (policies), `scale`.

A suite is a module: its arguments, its table, and what one worker does. `benchmarks/__main__.py` lists them.
"""
