"""Subscriptions to captured rows: state, events, and the workers of both clients."""
