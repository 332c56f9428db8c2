"""Makes the synchronous client of the asyncio client: `unasync_client.py AIO.py ENGINE.py`.

It runs in the generators' environment, which has unasync. What differs beyond `async` and `await`
is in `REPLACEMENTS`.
"""

import sys
import tempfile
from pathlib import Path

import unasync

HEADER = '''"""The synchronous client, generated from aio.py by tools/generate: edit aio.py instead.

It runs on gRPC's own threads, so it works inside a running event loop, as in a notebook, and may be
shared between threads.
"""

'''
REPLACEMENTS = {
    "aio.Engine": "Engine",
    "aio_connection": "connection",
    "aio_subscription": "subscription",
    "anext": "next",
}


def main(source: Path, target: Path) -> None:
    """Writes the synchronous client to `target`."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "aio", Path(folder) / "sync"
        before.mkdir()
        (before / target.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        rule = unasync.Rule(str(before), str(after), REPLACEMENTS)
        unasync.unasync_files([str(before / target.name)], [rule])
        text = (after / target.name).read_text(encoding="utf-8")
    _, imports, code = text.partition("from __future__")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(HEADER + imports + code, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
