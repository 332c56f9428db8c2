"""Watches: stream readings of requests to other clients, with rules that act on them."""
