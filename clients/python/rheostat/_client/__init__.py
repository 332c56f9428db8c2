"""Requests, sessions and calls, and the synchronous engine, generated from `rheostat.aio`."""
