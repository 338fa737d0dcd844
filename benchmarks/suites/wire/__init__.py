"""What a wire format or encryption saves and costs: `compression`, with `training` for its bytes and accuracy, and `tls`."""
