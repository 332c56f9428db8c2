"""Errors of vector files, and the atomic replacement of a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rheostat._errors import InvalidRequest, invalid


def bad_file(
    path: Path, why: str, remedy: str, reason: str = "REASON_INVALID_VALUE"
) -> InvalidRequest:
    """The error for a file that cannot be used, with the cause and a remedy."""
    return invalid(str(path), f"{path} {why}: {remedy}", reason)


def unreadable(path: Path, error: Exception) -> InvalidRequest:
    """The error for a file that is missing, incomplete or of another format."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return bad_file(path, f"cannot be read ({why})", "does it exist, and is it complete?")


def only_name(path: Path, names: Collection[str], noun: str) -> str:
    """The name of the one array in a file. Raises InvalidRequest if there is another number."""
    if len(names) != 1:
        shown = ", ".join(sorted(names)[:5]) or "none"
        raise bad_file(
            path,
            f"holds {len(names)} {noun}s ({shown})",
            f"save one {noun}, [width] or [rows, width]",
        )
    return next(iter(names))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """`replaced_file`, but raises InvalidRequest if the file cannot be written."""
    try:
        with replaced_file(path) as temporary:
            yield temporary
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        remedy = "does its folder exist?" if missing else "write to another place"
        raise bad_file(path, f"cannot be written ({error.strerror or error})", remedy) from error


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces ``path`` unless the block raises.

    An existing file keeps its mode. If ``path`` is a symbolic link, its target is replaced. A
    device or a pipe is not replaced: its own path is yielded.
    """
    real_path = Path(os.path.realpath(path))
    if real_path.exists() and not real_path.is_file():
        yield real_path
        return
    temporary = real_path.with_name(f".{uuid4().hex}.part.{real_path.name}")  # same suffix
    try:
        yield temporary
        if real_path.exists():
            shutil.copymode(real_path, temporary)
        os.replace(temporary, real_path)
    finally:
        temporary.unlink(missing_ok=True)
