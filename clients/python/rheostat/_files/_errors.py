"""How files fail: one error that names the file, and one that names the library to install."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rheostat._errors import InvalidRequest, Refused, invalid


def bad_file(
    path: Path, why: str, remedy: str, reason: str = "REASON_INVALID_VALUE"
) -> InvalidRequest:
    """The error of a file that is no vector: what is wrong with it, and what to do."""
    return invalid(str(path), f"{path} {why}: {remedy}", reason)


def unreadable(path: Path, error: Exception) -> InvalidRequest:
    """The error of a file that is not there, not whole or of another format."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return bad_file(path, f"cannot be read ({why})", "is it there, and whole?")


def missing_library(error: ModuleNotFoundError) -> Refused:
    """The error of a format whose library is not installed."""
    return Refused(
        f"this file format needs {error.name}: pip install {error.name}, "
        "or, in a checkout, pip install '.[files]'"
    )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of ``path`` once it is whole; links stay links.

    Raises InvalidRequest if it cannot be written.
    """
    real_path = Path(os.path.realpath(path))
    part = real_path.with_name(f".{real_path.name}.{uuid4().hex}.part")
    try:
        yield part
        os.replace(part, real_path)
    except OSError as error:
        raise bad_file(
            path, f"cannot be written ({error.strerror or error})", "is there a folder for it?"
        ) from error
    finally:
        part.unlink(missing_ok=True)
