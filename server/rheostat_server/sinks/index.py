"""Where the files of requests lie in a root: a small database beside them.

Why a database: a root may hold millions of requests under thousands of tags. A lookup must not walk
the tags, read whole indices into memory, or keep a table of all requests there.

Rules that its users follow:

* The files are the truth. A request is published first and entered here afterwards, so what the
  database says of a request was there. `recover` compares both when the server starts, and enters
  what a crash left out.
* A file that cannot be entered (the disk is full) is still published. It waits in memory and is
  entered with the next one. Once too many wait, `check_writable` refuses new requests.
* Readers have a connection of their own. In SQLite's write-ahead mode no writer waits for them.
"""

import logging
import os
import sqlite3
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rheostat_server.sinks.protocol import SinkError

_LOG = logging.getLogger(__name__)

INDEX = ".index.sqlite"
"""Its name in the root."""

_VERSION = 1
_LATE = 1024
_SCHEMA = """
CREATE TABLE tags (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, listed INTEGER);
CREATE TABLE shards (
    tag INTEGER, number INTEGER, rows_end INTEGER, index_end INTEGER, run TEXT, damaged INTEGER,
    PRIMARY KEY (tag, number)
) WITHOUT ROWID;
CREATE TABLE requests (
    request TEXT, tag INTEGER, shard INTEGER, offset INTEGER, length INTEGER,
    PRIMARY KEY (request, tag, shard, offset)
) WITHOUT ROWID;
CREATE INDEX requests_of_tags ON requests (tag, shard);
"""


class Place(NamedTuple):
    """Where the manifest of a request lies."""

    tag: str
    shard: int = 0
    """Number of the shard in whose index its line is; 0: it has a folder of its own."""
    offset: int = 0
    """Of the line."""
    length: int = 0


class Shard(NamedTuple):
    """How far a shard is filled."""

    number: int
    rows_end: int
    index_end: int
    ours: bool = False
    """Whether this process began it and may go on with it."""
    damaged: bool = False
    """Whether its index cannot be read."""


class ArtifactIndex:
    """The database of a root. For any thread."""

    def __init__(self, root: Path) -> None:
        """Opens it; makes an empty one where there is none that can be used.

        Args:
            root: the folder, which is this process's own.

        Raises:
            OSError: it can be neither opened nor made.
        """
        self._path = root / INDEX
        self._run = uuid.uuid4().hex
        self._writing, self._reading = Lock(), Lock()
        self._late: list[tuple[str, Place, int]] = []
        """Requests that could not be entered: id, place, and where their rows end."""
        self._writer = self._reader = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._open()
        except sqlite3.Error as error:
            _LOG.warning("the index %s is made anew: %s", self._path, error)
            self.clear()

    def _open(self) -> None:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise sqlite3.DatabaseError("it is no file")
        self._writer, self._reader = _connected(self._path), _connected(self._path)
        ((version,),) = self._writer.execute("PRAGMA user_version")
        if version != _VERSION:
            if version:
                raise sqlite3.DatabaseError(f"it has version {version}")
            self._writer.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT")

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")

    def clear(self) -> None:
        """Makes it anew. Raises OSError."""
        self.close()
        self._remove()
        try:
            self._open()
        except sqlite3.Error as error:
            raise OSError(f"no index can be made: {error}") from error

    def close(self) -> None:
        """Gives it up."""
        with self._writing, self._reading:
            self._writer.close()
            self._reader.close()

    @property
    def behind(self) -> bool:
        """Whether something that was published could not be entered."""
        return bool(self._late)

    def check_writable(self) -> None:
        """Refuses more requests while too many could not be entered. Raises SinkError."""
        if len(self._late) >= _LATE:
            raise SinkError("the sink's index cannot be written: look at its disk")

    def find(self, request_id: str) -> list[Place]:
        """Where a request lies, by tag. Raises SinkError."""
        # First those that wait: they may be entered, and so leave the list, at any moment.
        found = {place for name, place, _ in tuple(self._late) if name == request_id}
        with self._reading:
            rows = _all(
                self._reader,
                "SELECT name, shard, offset, length FROM requests JOIN tags ON tag = id"
                " WHERE request = ?",
                request_id,
            )
        return sorted(found | {Place(*row) for row in rows})

    def in_shards(self, tag: str, request_id: str) -> bool:
        """Whether a request lies in the shards of a tag. Raises SinkError."""
        return any(place.shard and place.tag == tag for place in self.find(request_id))

    def shards(self, tag: str) -> list[Shard]:
        """The shards of a tag, ascending. Raises SinkError."""
        with self._reading:
            rows = _all(
                self._reader,
                "SELECT number, rows_end, index_end, run = ?, damaged FROM shards"
                " WHERE tag = (SELECT id FROM tags WHERE name = ?) ORDER BY number",
                self._run,
                tag,
            )
        return [
            Shard(number, rows_end, index_end, bool(ours), bool(damaged))
            for number, rows_end, index_end, ours, damaged in rows
        ]

    def enter(self, request_id: str, place: Place, rows_end: int = 0) -> None:
        """Enters a request that was published; with a shard, where its rows end there."""
        with self._writing:
            self._late.append((request_id, place, rows_end))
            try:
                with self._writer:
                    for late in self._late:
                        self._enter(*late)
            except sqlite3.Error as error:
                if len(self._late) == 1:
                    _LOG.error("the index %s cannot be written: %s", self._path, error)
            else:
                self._late.clear()

    def _enter(self, request_id: str, place: Place, rows_end: int) -> None:
        tag = self._tag(place.tag)
        self._writer.execute(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?)", (request_id, tag, *place[1:])
        )
        if place.shard:
            ends = rows_end, place.offset + place.length
            self._set_shard(tag, Shard(place.shard, *ends, ours=True))
        else:
            self._writer.execute("UPDATE tags SET listed = NULL WHERE id = ?", (tag,))

    def give_up(self, tag: str, shard: Shard) -> None:
        """Notes that nothing is appended to a shard any more."""
        with self._writing, suppress(sqlite3.Error), self._writer:
            self._set_shard(self._tag(tag), shard)

    # What follows is for `recover`, which has the root to itself.

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One transaction. Raises SinkError."""
        try:
            with self._writing, self._writer:
                yield
        except sqlite3.Error as error:
            raise SinkError(f"the sink's index cannot be written: {error}") from error

    def tags(self) -> list[tuple[str, int | None]]:
        """Every tag, and the time of change of its folder of requests when that was listed."""
        return [
            (name, listed)
            for name, listed in _all(self._writer, "SELECT name, listed FROM tags ORDER BY name")
        ]

    def set_listed(self, tag: str, listed: int | None) -> None:
        """Notes when the folder of a tag's requests was changed last before it was listed."""
        self._writer.execute("UPDATE tags SET listed = ? WHERE id = ?", (listed, self._tag(tag)))

    def set_shard(self, tag: str, shard: Shard) -> None:
        """Notes how far a shard is filled."""
        self._set_shard(self._tag(tag), shard)

    def add_lines(self, tag: str, shard: int, lines: Iterable[tuple[str, int, int]]) -> None:
        """Enters lines of a shard's index: request, offset, length."""
        number = self._tag(tag)
        self._writer.executemany(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?)",
            ((request, number, shard, offset, length) for request, offset, length in lines),
        )

    def remove_shard(self, tag: str, shard: int) -> None:
        """Forgets a shard and the requests in it."""
        for table, column in (("requests", "shard"), ("shards", "number")):
            self._writer.execute(
                f"DELETE FROM {table} WHERE tag = ? AND {column} = ?", (self._tag(tag), shard)
            )

    def set_folders(self, tag: str, requests: Iterable[str]) -> None:
        """Enters the requests of a tag that have a folder, and forgets all others of the kind."""
        number = self._tag(tag)
        self._writer.execute("CREATE TEMP TABLE IF NOT EXISTS listed (request TEXT PRIMARY KEY)")
        self._writer.execute("DELETE FROM listed")
        self._writer.executemany(
            "INSERT OR IGNORE INTO listed VALUES (?)", ((name,) for name in requests)
        )
        self._writer.execute(
            "DELETE FROM requests WHERE tag = ? AND shard = 0"
            " AND request NOT IN (SELECT request FROM listed)",
            (number,),
        )
        self._writer.execute(
            "INSERT OR IGNORE INTO requests SELECT request, ?, 0, 0, 0 FROM listed", (number,)
        )

    def remove_tag(self, tag: str) -> None:
        """Forgets a tag and all that lies under it."""
        number = self._tag(tag)
        for table, column in (("requests", "tag"), ("shards", "tag"), ("tags", "id")):
            self._writer.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))

    def _tag(self, name: str) -> int:
        self._writer.execute("INSERT OR IGNORE INTO tags (name) VALUES (?)", (name,))
        ((number,),) = self._writer.execute("SELECT id FROM tags WHERE name = ?", (name,))
        return int(number)

    def _set_shard(self, tag: int, shard: Shard) -> None:
        self._writer.execute(
            "INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?)",
            (tag, *shard[:3], self._run if shard.ours else "", shard.damaged),
        )


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
    # A crash of the system may lose the last entries; `recover` finds the files.
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 256"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _all(connection: sqlite3.Connection, query: str, *values: str) -> list[Any]:
    try:
        return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise SinkError(f"the sink's index cannot be read: {error}") from error
