"""Coordination of workers: `policies` compares the policies, `straggler` has late workers, with and without backup workers."""
