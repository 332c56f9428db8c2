"""Watches: readings of requests that others run, delivered live, and rules that act on them."""
