"""The network between processes under test: small servers, faults, floods, certificates. Knows bytes; no training."""
