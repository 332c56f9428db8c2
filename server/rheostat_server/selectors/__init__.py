"""Selectors: which sites, and which positions of a request."""
