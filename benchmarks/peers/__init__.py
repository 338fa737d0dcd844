"""The same work on other systems for synchronous training, side by side with Lockstep. Each has a Python environment of its own."""
