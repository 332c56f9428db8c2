"""The side channel: reports and captured rows from the workers to the server."""
