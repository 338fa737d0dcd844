"""What a step costs: time, CPU and memory, of real processes. Asserts nothing; a smoke test only checks that it runs."""
