"""Runs: rows of a request kept on the server, for patches to draw from."""
