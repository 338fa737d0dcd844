"""Cost and benefit of wire formats: `compression`, with `training` for its bytes and accuracy."""
