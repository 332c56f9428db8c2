"""The folder of vectors: a safetensors file per vector, named by digest, and a table of names.

A file under its final name is complete, even after a power failure. A file whose content does not
match its digest is renamed, but neither loaded nor deleted. Only one server uses a folder at a
time. Calls wait for the disk, so they run off the event loop, one at a time.
"""

import logging
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, TensorSpec, deserialize, safe_open, serialize

from rheostat_server.errors import NonFinite, NotSupported, VectorDirFailed
from rheostat_server.tasks.open_files import lock_file
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.names import NameFile
from rheostat_server.vectors.store import Name, Vector, make_vector

_LOG = logging.getLogger(__name__)

_LOCK = "lock"
_EARLIER_NAMES = "names.json"
"""The file in which earlier versions stored names."""
_TENSOR = "vector"
_STORE_TIME, _EARLIER_STORE_TIME = "store_time", "stored_at"
_FILE = re.compile(r"[0-9a-f]{64}\.safetensors")
_KINDS = {"F32": FloatType.FLOAT32, "F16": FloatType.FLOAT16, "BF16": FloatType.BFLOAT16}


class Saved(NamedTuple):
    """A vector of the folder."""

    vector: Vector
    store_time: float
    """Seconds since the epoch."""


class Contents(NamedTuple):
    """The content of the folder."""

    vectors: list[Saved]
    """Oldest first."""
    names: dict[str, Name]
    """The names of these vectors."""


class _Damaged(Exception):
    """The content of a file does not match its name."""


class VectorFiles:
    """A folder that only this server uses until `close`."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if there is none, and locks it.

        Raises:
            VectorDirFailed: another server uses the folder, or it cannot be written.
        """
        self.folder = folder
        self._names = NameFile(folder)
        with ExitStack() as resources:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock_file(folder / _LOCK, 0o644, resources)
            except BlockingIOError as error:
                raise VectorDirFailed(
                    f"another server keeps its vectors in {folder}: give each its own --vector-dir"
                ) from error
            except OSError as error:
                raise _unusable(folder, error) from error
            resources.callback(self._names.close)
            self._resources = resources.pop_all()
        self._orphans: list[str] = []
        """Names without a vector, which are still on the disk."""

    def close(self) -> None:
        """Unlocks the folder."""
        self._resources.close()

    def read(self) -> Contents:
        """Reads all vectors and names.

        Damaged files are set aside, and files of unfinished writes are deleted. Names without a
        vector are dropped. The next write of a vector or a name removes them from the disk first.

        Raises:
            VectorDirFailed: a file cannot be read, or the table of names is invalid.
        """
        self._warn_of_earlier_names()
        try:
            for part in self.folder.glob(".*.part"):
                part.unlink()
            vectors = self._read_vectors()
            names = self._names.read()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        digests = {saved.vector.digest for saved in vectors}
        self._orphans = [name for name, label in names.items() if label.digest not in digests]
        for name in self._orphans:
            _LOG.warning(
                'the name "%s" is dropped: its vector %s is not in %s',
                name, names.pop(name).digest.hex(), self.folder,
            )  # fmt: skip
        return Contents(vectors, names)

    def write(self, vector: Vector, store_time: float) -> None:
        """Returns once the vector is on the disk.

        Raises:
            OSError: the folder cannot be written, and is as it was.
            NotSupported: the folder cannot be written, and may have changed.
        """
        if self._orphans:
            # A dropped name may refer to this vector, and must not appear with it again.
            self._names.delete_names(self._orphans)
            self._orphans = []
        data = np.frombuffer(vector.data, np.uint8)
        tensor = TensorSpec(
            dtype=vector.kind.value,
            shape=(vector.rows, vector.width),
            data_ptr=data.ctypes.data,
            data_len=data.nbytes,
        )
        file = serialize({_TENSOR: tensor}, metadata={_STORE_TIME: repr(store_time)})
        self._replace(_file_name(vector.digest), file)

    def remove(self, digest: bytes) -> None:
        """Deletes a vector's file. Raises OSError if it stays."""
        (self.folder / _file_name(digest)).unlink(missing_ok=True)

    def set_name(self, name: str, label: Name) -> None:
        """Returns once the disk has the name. Raises as `write`."""
        self._names.set_name(name, label)
        self._orphans = [orphan for orphan in self._orphans if orphan != name]

    def delete_name(self, name: str) -> None:
        """Returns once the name has left the disk. Raises as `write`."""
        self._names.delete_names([name])

    def _warn_of_earlier_names(self) -> None:
        path = self.folder / _EARLIER_NAMES
        if path.exists():
            _LOG.warning(
                "%s was written by an earlier version and is not read: the vectors are here, but "
                "without its names, and may be evicted. Name them again (rheostat vectors name "
                "NAME DIGEST; the file has the digests), then delete it",
                path,
            )

    def _replace(self, name: str, data: bytes) -> None:
        path = self.folder / name
        before = path.read_bytes() if path.exists() else None
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            _move_in(data, path)
            try:
                os.fsync(folder)
            except OSError as error:
                _move_back(before, path, error)
                raise
        finally:
            os.close(folder)

    def _read_vectors(self) -> list[Saved]:
        vectors = []
        for path in sorted(self.folder.iterdir()):
            if not _FILE.fullmatch(path.name):
                continue
            try:
                vectors.append(_read_vector(path))
            except _Damaged as damage:
                aside = _free_name(path)
                os.replace(path, aside)
                _LOG.error("%s is damaged, %s; it is %s from here on", path, damage, aside.name)
        return sorted(vectors, key=lambda saved: saved.store_time)


def _move_in(data: bytes, path: Path) -> None:
    """Writes a complete file, or raises OSError and changes nothing."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _move_back(before: bytes | None, path: Path, reason: OSError) -> None:
    """Restores the earlier content of a file, or deletes the file if there was none.

    Raises:
        NotSupported: the file keeps its new content.
    """
    try:
        if before is None:
            path.unlink()
        else:
            _move_in(before, path)
    except OSError as error:
        _LOG.error("%s was written, but perhaps not for good: %s", path, reason)
        raise NotSupported(
            f"the server's --vector-dir cannot be written ({reason.strerror or reason}); a restart "
            "may bring the change"
        ) from error


def _file_name(digest: bytes) -> str:
    return f"{digest.hex()}.safetensors"


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


def _read_vector(path: Path) -> Saved:
    """The vector of a file. Its digest must match the name of the file."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        earlier = _EARLIER_STORE_TIME in metadata
        store_time = float(metadata[_EARLIER_STORE_TIME if earlier else _STORE_TIME])
        ((_, tensor),) = deserialize(path.read_bytes())
        kind = _KINDS[tensor["dtype"]]
        rows, width = tensor["shape"]
        vector = make_vector(kind, rows, width, bytes(tensor["data"]), path.name)
    except (SafetensorError, ValueError, KeyError, NonFinite) as error:
        raise _Damaged(f"it holds no vector ({error})") from error
    if _file_name(vector.digest) != path.name:
        raise _Damaged(f"its content has the digest {vector.digest.hex()}")
    return Saved(vector, store_time)


def _unusable(folder: Path, error: OSError) -> VectorDirFailed:
    return VectorDirFailed(f"vectors cannot be kept in {folder}: {error.strerror or error}")
