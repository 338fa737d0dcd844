"""Runs and measures workloads: settings, processes, memory, bytes, and timing of calls. Knows no suite and prints no table."""
