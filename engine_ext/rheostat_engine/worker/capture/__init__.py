"""The captures of running requests, and the ring of captured rows."""
