"""How a call is carried: its description, the two kinds of connection, and waiting for a server."""
