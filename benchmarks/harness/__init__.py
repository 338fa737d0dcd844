"""How a workload is run and watched: settings, processes, memory, bytes and seams. Knows no suite and prints no table."""
