"""A server that cannot start says why in one line."""

import os
from pathlib import Path

from .conftest import arguments, free_port
from .forked_servers import ForkedServer, Order

SMALL = ("--enforce-eager", "--front-ends", "0", "--kv-cache-memory-mib", "64")


def ended(folder: Path, model: str, *options: str) -> tuple[int, str]:
    """The exit code of a server that does not start, and its line."""
    log = folder / "log"
    order = arguments(model, free_port(), *SMALL, *options)
    process = ForkedServer(Order(order, dict(os.environ), str(log), own_group=False))
    try:
        code = process.wait(120)
    finally:
        process.kill()
    (line,) = [one for one in log.read_text().splitlines() if one.startswith("rheostat: ")]
    return code, line


def test_a_staging_area_that_does_not_fit_into_the_memory_is_refused(tmp_path: Path) -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    code, line = ended(tmp_path, "demo", "--staging-mib", str(installed))
    assert code == 2
    assert line.startswith("rheostat: the worker takes ")
    assert f"(--staging-mib {installed}, --capture-mib 512, --bank-mib 256), but only " in line
    assert " MiB are available. Lower --staging-mib to " in line
