"""What the three roles agree on: words, checks and the wire. Knows no role."""
