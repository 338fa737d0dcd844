"""The chief under test: its core driven by hand, its runner on an event loop, a whole one in a thread. Asserts nothing."""
