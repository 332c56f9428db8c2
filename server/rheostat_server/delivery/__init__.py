"""Delivers captured rows to their readers."""
