"""Rheostat's server: `rheostat.v1` over gRPC, with vLLM inside."""

from rheostat_server.config import ServerConfig

__all__ = ["ServerConfig"]
