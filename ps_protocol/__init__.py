"""The words, checks and wire format that the three roles share. Knows no role."""
