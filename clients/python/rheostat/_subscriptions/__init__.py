"""Subscriptions to rows: their state, the events that they bring, and both kinds of reader."""
