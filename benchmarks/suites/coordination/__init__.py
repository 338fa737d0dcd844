"""Coordination of workers: `policies` compares the policies, `straggler` measures late workers with and without backup workers."""
