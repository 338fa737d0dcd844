"""Real processes of tests: roles, commands, workers that take tasks, a browser. Knows how each is started and ended; asserts nothing."""
