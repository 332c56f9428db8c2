"""Running requests, and what they hold."""
