"""Requests, sessions and calls, and the synchronous engine. `rheostat.aio` has its twin."""
