"""Stored vectors, their names, files and uploads."""
