"""Benchmarks run against the server of its own tests."""

from ..server.conftest import running, starter

__all__ = ["running", "starter"]
