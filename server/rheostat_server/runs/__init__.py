"""Runs: rows of a request that the server stores, as a source of patches."""
