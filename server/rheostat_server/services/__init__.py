"""The rpcs of `rheostat.v1`, one module per service that does something."""
