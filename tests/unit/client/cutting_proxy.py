"""A proxy for TCP that breaks its connections whenever a test says so."""

import contextlib
import socket
import struct
import threading

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER, so that closing a socket resets its connection, and drops what was not sent."""


class CuttingProxy:
    """Forwards connections to a port of this host."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Reset every connection, in the middle of whatever it carries; returns their number."""
        with self._lock:
            broken, self._open = self._open, []
        for one in broken:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        return len(broken) // 2

    def close(self) -> None:
        """Accept nothing more, and break everything."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                with self._lock:
                    self._open += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was cut
            while data := source.recv(1 << 14):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
