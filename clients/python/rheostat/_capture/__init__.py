"""Capture specs and their encodings; captured rows, runs and files."""
