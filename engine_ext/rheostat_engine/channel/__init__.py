"""What workers report to the server, and how it gets there."""
