"""Lets this process reuse freed memory instead of asking the system for fresh pages.

Why
    By default glibc returns large blocks to the system when they are freed. Captured rows and
    messages are such blocks, thousands in a second, and a copy into fresh pages takes five times as
    long as a copy into memory that was used before.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`."""

_REUSED_BLOCK = 8 << 20
"""Bytes of the largest block that is reused."""

_KEPT = 64 << 20
"""Free bytes that each arena keeps."""

_ARENAS = 4
"""Arenas, which all threads share. So all together keep 256 MiB at most."""


def keep_freed_memory() -> bool:
    """Makes this process keep some freed memory. Returns False if its C library cannot."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {
        _M_ARENA_MAX: _ARENAS,
        _M_MMAP_THRESHOLD: _REUSED_BLOCK,
        _M_TRIM_THRESHOLD: _KEPT,
    }
    return {mallopt(option, value) for option, value in options.items()} == {1}
