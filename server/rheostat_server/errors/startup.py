"""Why a server does not start, or does not go on. Each class has an exit code of its own."""

import errno
from typing import ClassVar


class ServerFailed(Exception):
    """The server has to end; the message says why and what to do."""

    exit_code: ClassVar[int] = 1


class StartupError(ServerFailed):
    """The server cannot start."""


class InvalidConfig(StartupError):
    """A setting cannot be used."""

    exit_code = 2


class PortInUse(StartupError):
    """The address cannot be listened on."""

    exit_code = 3

    @classmethod
    def of(cls, address: str, error: OSError) -> "PortInUse":
        """The error of an `address` that the system does not give."""
        why = (error.strerror or str(error)).lower()
        if error.errno == errno.EADDRINUSE:
            why += ", perhaps by another rheostat serve: end it, or choose --port"
        return cls(f"cannot listen on {address}: {why}")


class ModelNotFound(StartupError):
    """There is no such model or adapter, or it cannot be read."""

    exit_code = 4


class EngineFailed(StartupError):
    """The engine did not come up."""

    exit_code = 5


class VectorDirFailed(StartupError):
    """The folder of vectors cannot be used."""

    exit_code = 6


class SinksFailed(StartupError):
    """A sink cannot be made."""

    exit_code = 7


class SpoolFailed(StartupError):
    """The folder of rows that wait on disk cannot be used."""

    exit_code = 8


class FrontEndFailed(StartupError):
    """A process that speaks gRPC for the server did not start."""

    exit_code = 10


class EngineDied(ServerFailed):
    """The engine was lost while the server served. A new process can serve again."""

    exit_code = 9
