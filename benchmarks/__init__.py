"""Benchmarks: time, CPU and memory of steps, in real processes. Asserts nothing; a smoke test only checks that they run."""
