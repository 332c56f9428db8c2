"""Work beside the event loop: threads for large work, shared queries, calls that end early."""
