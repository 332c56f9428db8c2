"""A folder of stored rows: its requests, and the rows of a site across all requests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from rheostat._errors import NotFound, Resource, invalid
from rheostat._points import Point, PointLike, Site, point_of
from rheostat.captures import _arrow
from rheostat.captures._batches import RowBatch, RowFilter, batched, concatenate, read_batches
from rheostat.captures._manifests import StoredRequest, read_manifest

if TYPE_CHECKING:
    import datasets
    import pyarrow

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INDEX = re.compile(r"shard-[0-9]{6,}\.jsonl")
_REQUESTS = "requests"
_SHARDS = "shards"
_MANIFEST = "manifest.json"
_SHOWN_TAGS = 10
"""Tags that an error lists."""
_BATCH_ROWS = 4096


class Which(TypedDict, total=False):
    """Arguments of `StoredCaptures.rows`."""

    batch: int
    sample: int | None
    baseline: bool | None
    capture_index: int | None


def open_captures(root: str | os.PathLike[str], *, tag: str | None = None) -> StoredCaptures:
    """The rows below the root of a `filesystem` sink, of one tag if it is given.

    The server may continue to write: every call reads the requests that are complete by then.
    Raises InvalidRequest if the folder does not exist or is inside a root, or if ``tag`` is not
    valid. Raises NotFound if nothing is stored under the tag.
    """
    path = Path(root)
    if not path.is_dir():
        raise invalid("root", f"{path} is not a folder: give the root= of the server's sink")
    if tag is not None and not _TAG.fullmatch(tag):
        raise invalid("tag", f'"{tag}" is not a valid tag: {_TAG.pattern}')
    stored = StoredCaptures(path, tag)
    tags = [one for one in StoredCaptures(path, None).tags if stored.holds(one)]
    if not tags:
        _check_outermost(path)
    if tag is not None and not stored.tags:
        raise _not_found(f'there is no tag "{tag}" in {path}; {_tags_text(tags)}', tag)
    return stored


def _tags_text(tags: Sequence[str]) -> str:
    if not tags:
        return "nothing is stored there yet: is it the root= of the server's sink?"
    more = len(tags) - _SHOWN_TAGS
    return f"there are {', '.join(tags[:_SHOWN_TAGS])}{f' and {more} more' if more > 0 else ''}"


class StoredCaptures:
    """Stored requests, by tag, then by name of the file or shard."""

    def __init__(self, root: Path, tag: str | None) -> None:
        self.root: Path = root
        self.tag: str | None = tag
        """The tag that is read; None: all tags."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The stored tags, in order."""
        names = [self.tag] if self.tag is not None else sorted(os.listdir(self.root))
        return tuple(
            name for name in names if _TAG.fullmatch(name) and _is_folder(self.root / name)
        )

    def holds(self, tag: str) -> bool:
        """Whether a sink has begun to store rows under a tag."""
        return any(_is_folder(self.root / tag / name) for name in (_REQUESTS, _SHARDS))

    def __iter__(self) -> Iterator[StoredRequest]:
        """Every request. Raises DataLoss for a manifest that cannot be read."""
        for tag in self.tags:
            folder = self.root / tag / _REQUESTS
            for name in _names(folder):
                request = _read_own(folder / name)
                if request is not None:
                    yield request
            for index in self._indexes(tag):
                for line in _lines(index):
                    yield read_manifest(line, index)

    def __getitem__(self, request_id: str) -> StoredRequest:
        """The request with that id, the first in the order of tags. Raises NotFound."""
        name = f"%2E{request_id[1:]}" if request_id.startswith(".") else request_id
        start = f'{{"request_id": "{request_id}"'.encode()
        for tag in self.tags:
            if name and "/" not in name:
                request = _read_own(self.root / tag / _REQUESTS / name)
                if request is not None:
                    return request
            for index in self._indexes(tag):
                for line in _lines(index):
                    if line.startswith(start):
                        return read_manifest(line, index)
        raise _not_found(
            f"no rows of the request {request_id} are stored in {self.root}", request_id
        )

    def __contains__(self, request_id: object) -> bool:
        try:
            return isinstance(request_id, str) and bool(self[request_id])
        except NotFound:
            return False

    def rows_of(
        self,
        request_id: str,
        point: PointLike,
        layer: int,
        *,
        sample: int | None = None,
        baseline: bool | None = False,
        capture_index: int | None = None,
    ) -> RowBatch:
        """All rows of one request at a site, in one batch.

        ``sample`` selects a sample; None: all. ``baseline``: False excludes the rows of the
        baseline, True selects only them, None selects both. ``capture_index`` selects a capture if
        several have the site; without it InvalidRequest is raised. Raises NotFound if there are no
        rows, DataLoss for a damaged file.
        """
        row_filter = RowFilter(point, layer, sample, baseline, capture_index)
        request = self[request_id]
        batches = list(read_batches(request, row_filter, _BATCH_ROWS))
        if not batches:
            site = Site(point_of(point), layer)
            raise _not_found(
                f"the request {request_id} has no such rows of {site}; "
                f"there are {_show_sites(request.sites)}",
                request_id,
            )
        return concatenate(batches)

    def rows(
        self,
        point: PointLike,
        layer: int,
        *,
        batch: int = _BATCH_ROWS,
        sample: int | None = None,
        baseline: bool | None = False,
        capture_index: int | None = None,
    ) -> Iterator[RowBatch]:
        """The rows of a site across all requests, ``batch`` rows at a time.

        At most two batches are in memory. The other arguments are those of `rows_of`. Raises
        InvalidRequest if rows of one batch differ in width or encoding, and NotFound at the end if
        only other sites have rows.
        """
        if batch < 1:
            raise invalid("batch", "a batch has at least one row")
        row_filter = RowFilter(point, layer, sample, baseline, capture_index)
        return batched(self._read_batches(row_filter, batch), batch)

    def _read_batches(self, row_filter: RowFilter, size: int) -> Iterator[RowBatch]:
        others: dict[tuple[Point, int], None] = {}
        has_site = False
        for request in self:
            has_site = has_site or bool(request.tables_at(row_filter.point, row_filter.layer))
            if not has_site:
                others.update(dict.fromkeys(request.sites))
            yield from read_batches(request, row_filter, size)
        if others and not has_site:
            site = Site(point_of(row_filter.point), row_filter.layer)
            raise _not_found(
                f"{self.root} has no rows of {site}; there are {_show_sites(others)}", str(site)
            )

    def verify(self) -> int:
        """Reads every file, and returns the number of requests. Raises DataLoss if damaged."""
        count = 0
        for request in self:
            request.verify()
            count += 1
        return count

    def to_arrow(self, point: PointLike, layer: int, **which: Unpack[Which]) -> pyarrow.Table:
        """The rows of a site as an Arrow table, in memory; ``which`` as in `rows`.

        Columns: tag, request_id, sample, baseline, position, token_id, values. Raises Refused
        without pyarrow.
        """
        return self.to_reader(point, layer, **which).read_all()

    def to_reader(
        self, point: PointLike, layer: int, **which: Unpack[Which]
    ) -> pyarrow.RecordBatchReader:
        """As `to_arrow`, one batch at a time, for instance to write a Parquet file."""
        return _arrow.reader(self.rows(point, layer, **which))

    def to_datasets(self, point: PointLike, layer: int, **which: Unpack[Which]) -> datasets.Dataset:
        """As `to_arrow`, as a Hugging Face dataset. Raises Refused without `datasets`."""
        return _arrow.dataset(self.rows(point, layer, **which))

    def _indexes(self, tag: str) -> list[Path]:
        folder = self.root / tag / _SHARDS
        return [folder / name for name in _names(folder) if _INDEX.fullmatch(name)]

    def __repr__(self) -> str:
        return f"StoredCaptures({str(self.root)!r}, tag={self.tag!r})"


def _check_outermost(path: Path) -> None:
    """Raise InvalidRequest if the folder is that of a tag, or inside it."""
    absolute = Path(os.path.abspath(path))
    for tag in (absolute, *absolute.parents[:2]):
        root, name = tag.parent, tag.name
        if any(True for _ in StoredCaptures(root, name)):
            raise invalid(
                "root", f'{path} is inside a root: write open_captures("{root}", tag="{name}")'
            )


def _not_found(message: str, name: str) -> NotFound:
    return NotFound(
        message, reason="REASON_ARTIFACT_NOT_FOUND", resource=Resource("artifact", name)
    )


def _show_sites(sites: Iterable[tuple[Point, int]]) -> str:
    return ", ".join(str(Site(*site)) for site in sites) or "none at all"


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if _is_folder(folder) else []


def _read_own(folder: Path) -> StoredRequest | None:
    path = folder / _MANIFEST
    try:
        return read_manifest(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lines(index: Path) -> Iterator[bytes]:
    """The complete lines. The server is still writing a line without an end."""
    with index.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
