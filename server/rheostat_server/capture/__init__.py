"""Captured rows: what is asked for, what becomes of them, and their way to whoever reads them."""
