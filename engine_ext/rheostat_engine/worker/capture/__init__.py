"""Captures in force, and the ring that their rows are copied to."""
