"""The services of `rheostat.v1`: rpcs, incoming messages, readiness."""
