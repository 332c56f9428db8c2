"""Subscriptions: live readers of other requests' rows, their calls, and how payloads reach them."""
