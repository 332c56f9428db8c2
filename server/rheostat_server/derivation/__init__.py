"""Vectors that are derived from prompts."""
