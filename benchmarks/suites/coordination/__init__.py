"""Whom a step waits for: `policies` compares them, `straggler` has late workers, with and without backup workers."""
