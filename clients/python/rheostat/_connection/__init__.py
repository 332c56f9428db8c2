"""Descriptions of calls, the two connections that carry them out, and waiting for a server."""
