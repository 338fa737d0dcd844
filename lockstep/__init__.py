"""The `lockstep` command, and clusters inside one process: the places where all roles are put together."""
