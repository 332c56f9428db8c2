"""The server's end of a worker's side channel."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ...frames import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(f"ipc://{tmp_path}/channel")
    yield server
    server.channel.close()
    server.close_loop()
