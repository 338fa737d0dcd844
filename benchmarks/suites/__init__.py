"""What is measured: one module for each benchmark, with its arguments and its table. Knows the harness; no other suite but `step`."""
