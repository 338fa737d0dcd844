"""Formats of others, read strictly: input that their own readers would refuse raises AssertionError. Knows no role."""
