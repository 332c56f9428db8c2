"""Errors of vector files, and the atomic replacement of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces ``path`` unless the block raises.

    If ``path`` is a symbolic link, its target is replaced. Raises InvalidRequest if the file cannot
    be written.
    """
    real_path = Path(os.path.realpath(path))
    part = real_path.with_name(f".{real_path.name}.{uuid4().hex}.part")
    try:
        yield part
        os.replace(part, real_path)
    except OSError as error:
        raise bad_file(
            path, f"cannot be written ({error.strerror or error})", "does its folder exist?"
        ) from error
    finally:
        part.unlink(missing_ok=True)
