"""Keeps glibc from returning freed memory to the system at once.

Why: the server copies captured rows into blocks of their own, some 300 KiB each, and frees them
milliseconds later. By default glibc maps each block anew, or shrinks its heap after each frame.
Then pages are faulted in again, and the kernel clears them under a lock that all threads share.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h

_MAPPED_BYTES = 32 << 20
"""Blocks from here on are mapped and unmapped one by one; glibc allows no more."""

KEPT_BYTES = 64 << 20
"""Freed bytes that each of glibc's arenas may keep."""

_ARENAS = 4
"""Arenas of the process. By default threads make up to eight for each core."""


def keep_freed_memory() -> bool:
    """Keeps up to `KEPT_BYTES` per arena from now on; False if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_ARENA_MAX, _ARENAS)
        and mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    )
