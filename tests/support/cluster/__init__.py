"""Clusters for tests, wherever they run, with the same words: of objects, of servers in this process (`here`), or of `processes`."""
