"""Watches: what probes read of requests that others run, and stops of these requests."""
