"""Processes that speak gRPC for the server, and the calls that they pass on."""
