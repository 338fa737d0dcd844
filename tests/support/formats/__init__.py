"""Formats of others, read strictly: what their own readers would refuse raises AssertionError. Knows no role."""
