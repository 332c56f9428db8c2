"""Front ends: processes that speak gRPC with clients and forward calls to the server."""
