"""Large clusters: `workers` (with `crowd` and `calls`), `variables` and `servers` (with `turns`)."""
