"""Memory that is freed and taken again is not faulted in again."""

import subprocess
import sys

import pytest

from rheostat_server.tasks.allocator import keep_freed_memory

FRAMES = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from rheostat_engine.channel.events import copy_arrays
from rheostat_server.tasks.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
views = list(np.ones((64, 36, 1, 4096), np.uint16))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with ThreadPoolExecutor(1) as pool:
    for _ in range(4):
        kept = pool.submit(copy_arrays, views).result()
    before = faults()
    for _ in range(8):
        kept = pool.submit(copy_arrays, views).result()  # the frame before is freed after it
    pages = 8 * sum(view.nbytes for view in views) / resource.getpagesize()
    print((faults() - before) / pages)
"""


def faulted(mode: str) -> float:
    """Share of the copied pages that were faulted in, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FRAMES, mode], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_rows_that_were_freed_leave_their_pages_to_the_next_frame() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    assert faulted("kept") < 0.5 * faulted("default")
