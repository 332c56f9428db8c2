"""Names of stored vectors on disk: one SQLite table.

Why a database: a server may have 65,536 names with descriptions and sites. A change of one name
must neither read nor write the others, and must be atomic even if the server crashes.

Calls run one at a time, off the event loop, because every change waits for the disk. When a call
returns, its change is on the disk. If it raises OSError, nothing has changed. If it raises
NotSupported, the change may appear when the server next starts.
"""

import errno
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from rheostat_server.errors import NotSupported, VectorDirFailed
from rheostat_server.vectors.store import Name
from rheostat_wire.v1 import types_pb2

NAMES_FILE = "names.sqlite"
"""The name of the table's file in the folder of vectors."""

_VERSION = 1
_SCHEMA = """
CREATE TABLE names (
    name TEXT PRIMARY KEY NOT NULL,
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    description TEXT NOT NULL,
    sites BLOB
) WITHOUT ROWID;
"""

_CLEAN = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}
"""Errors of SQLite that occur before anything is written, with their numbers as `OSError`s."""

_PRIMARY = 0xFF
"""Masks the extended part of SQLite's error codes."""


class NameFile:
    """The table of a folder that only this process uses. The first call opens or makes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAMES_FILE
        self._opened: sqlite3.Connection | None = None

    def close(self) -> None:
        """Closes the database."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def read(self) -> dict[str, Name]:
        """All names.

        Raises:
            VectorDirFailed: the file is not a table of names.
        """
        try:
            rows = self._database().execute("SELECT name, digest, description, sites FROM names")
            return {name: _label(*rest) for name, *rest in rows}
        except (sqlite3.Error, DecodeError, TypeError) as error:
            raise VectorDirFailed(
                f"{self.path} is not a table of names ({error}): repair it, or move it away to "
                "start without names"
            ) from error

    def set_name(self, name: str, label: Name) -> None:
        """Adds a name, or moves it to another vector.

        Raises:
            OSError: the disk cannot be written, and nothing was changed.
            NotSupported: the disk cannot be written; a restart may bring the change.
        """
        sites = None if label.sites is None else label.sites.SerializeToString()
        row = (name, label.digest, label.description, sites)
        self._change("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", [row])

    def delete_names(self, names: Iterable[str]) -> None:
        """Deletes names, all or none. Raises as `set_name`."""
        self._change("DELETE FROM names WHERE name = ?", [(name,) for name in names])

    def _change(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        try:
            database = self._database()
            with database:
                database.execute("BEGIN IMMEDIATE")
                database.executemany(statement, rows)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY
            if code in _CLEAN:
                raise OSError(_CLEAN[code], str(error)) from error
            raise NotSupported(
                f"the server's --vector-dir cannot be written ({error}); a restart may bring the "
                "change"
            ) from error

    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = _connect(self.path)
        return self._opened


def _connect(path: Path) -> sqlite3.Connection:
    """Opens a connection for one thread at a time. A commit returns once it is on the disk."""
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        ((version,),) = database.execute("PRAGMA user_version")
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it has version {version}")
        if not version:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT")
    except BaseException:
        database.close()
        raise
    return database


def _label(digest: bytes, description: str, sites: bytes | None) -> Name:
    site_set = None if sites is None else types_pb2.SiteSet.FromString(sites)
    return Name(digest, description, site_set)
