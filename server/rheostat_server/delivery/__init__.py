"""Captured rows on their way to whoever reads them."""
