"""Streams of numbered events that outlive a connection: the base of subscriptions and watches."""
