"""Subscriptions to captured rows: state, events, and the subscriptions of both clients."""
