"""What the allocator does with freed memory."""

import resource
import subprocess
import sys

_COUNT_FAULTS = """
import resource
from rheostat_server.allocator import keep_freed_memory
if {kept}:
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    blocks = [bytearray(4 << 20) for _ in range(4)]
    for block in blocks:
        block[::4096] = bytes(len(block) // 4096)
for _ in range(3):
    use()
before = faults()
for _ in range(10):
    use()
print(faults() - before)
"""


def page_faults(*, kept: bool) -> int:
    """Page faults of a process that allocates, fills and frees 16 MiB ten times."""
    script = _COUNT_FAULTS.format(kept=kept)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return int(done.stdout)


def test_freed_memory_is_used_again_without_page_faults() -> None:
    pages = (16 << 20) // resource.getpagesize()
    assert page_faults(kept=False) > 5 * pages
    assert page_faults(kept=True) < pages // 2
