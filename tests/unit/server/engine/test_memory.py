"""A server that its machine has too little memory for does not start, and says what to lower."""

import os
from pathlib import Path

import pytest

from rheostat_engine import EngineSettings
from rheostat_server.engine.memory import (
    Sizes,
    available_memory,
    check_device_memory,
    check_host_memory,
    check_kv_cache,
)
from rheostat_server.errors import InvalidConfig

MIB = 1 << 20
KIB_AVAILABLE = 8 << 20
"""8 GiB."""


def sizes(ring: int, staging: int, *, bank: int = 256, ranks: int = 1, areas: int = 1) -> Sizes:
    """Sizes in MiB."""
    settings = EngineSettings(
        "ipc:///a", bank_bytes=bank * MIB, capture_bytes=ring * MIB, staging_bytes=staging * MIB
    )
    return Sizes(settings, ranks, areas)


def machine(root: Path, groups: str = "", **files: object) -> int:
    """The available bytes of a machine whose control groups have these files, by path."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc.parent / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemFree: 5 kB\nMemAvailable: {KIB_AVAILABLE} kB\n"
    )
    (proc / "cgroup").write_text(groups)
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return available_memory(root) // MIB


def group(folder: str, limit: object, usage: int, stat: str = "inactive_file 0") -> dict[str, str]:
    """The files of a group of version 2; sizes in MiB."""
    limit = limit * MIB if isinstance(limit, int) else limit
    stat = f"anon 7\n{stat}\nactive_file 0" if "active_file" not in stat.split() else stat
    return {
        f"{folder}memory.max": str(limit),
        f"{folder}memory.current": str(usage * MIB),
        f"{folder}memory.stat": stat,
    }


def test_a_machine_without_control_groups_has_what_the_kernel_says(tmp_path: Path) -> None:
    assert machine(tmp_path) == KIB_AVAILABLE >> 10


def test_a_container_has_what_its_group_leaves(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/\n", **group("", 4096, 1000)) == 3096


def test_a_group_without_a_limit_takes_nothing_away(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/\n", **group("", "max", 1000)) == KIB_AVAILABLE >> 10


def test_the_smallest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {**group("", "max", 0), **group("a/", 3000, 1000), **group("a/b/", 4000, 1000)}
    assert machine(tmp_path, "0::/a/b\n", **files) == 2000


def test_cached_files_of_a_group_are_no_obstacle(tmp_path: Path) -> None:
    stat = f"inactive_file {100 * MIB}\nactive_file {900 * MIB}"
    assert machine(tmp_path, "0::/\n", **group("", 4096, 3096, stat)) == 2000


def test_a_group_that_takes_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/\n", **group("", 100, 200)) == 0


def test_a_path_of_the_host_leads_to_the_group_of_the_container(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/docker/abc\n", **group("", 4096, 1000)) == 3096


def test_groups_of_the_first_version_count_their_descendants(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": 2000 * MIB,
        "memory/a/memory.usage_in_bytes": 1500 * MIB,
        "memory/a/memory.stat": f"active_file 1\ninactive_file 2\n"
        f"total_inactive_file {100 * MIB}\ntotal_active_file {200 * MIB}",
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 1500 * MIB,
        "memory/memory.stat": "total_inactive_file 0\ntotal_active_file 0",
    }
    groups = "5:devices:/\n4:cpu,memory:/a\n0::/\n"
    assert machine(tmp_path, groups, **files) == 800


def test_a_system_that_says_nothing_has_what_is_installed(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_what_fits_is_not_refused() -> None:
    check_host_memory(sizes(2048, 4096), cpu=False, available=4096 * MIB)
    check_host_memory(sizes(512, 1024), cpu=True, available=(1024 + 512 + 256) * MIB)
    check_device_memory(sizes(2048, 0).settings, available=(2048 + 256 + 128) * MIB + 1)


@pytest.mark.parametrize(
    ("wanted", "cpu", "available", "message"),
    [
        (
            sizes(512, 4096),
            False,
            4095,
            "the worker takes 4096 MiB of host memory (--staging-mib 4096), but only 4095 MiB are "
            "available. Lower --staging-mib to 2047 or less",
        ),
        (
            sizes(2048, 4096),
            False,
            3000,
            "the worker takes 4096 MiB of host memory (--staging-mib 4096), but only 3000 MiB are "
            "available. Lower --capture-mib and --staging-mib to 1500 or less",
        ),
        (
            sizes(2048, 1),
            False,
            2000,
            "the worker takes 2048 MiB of host memory (--staging-mib 2048), but only 2000 MiB are "
            "available. Lower --capture-mib and --staging-mib to 1000 or less",
        ),
        (
            sizes(512, 1024, ranks=8, areas=4),
            False,
            4000,
            "8 workers take 4096 MiB of host memory (--staging-mib 1024), but only 4000 MiB are "
            "available. Lower --capture-mib and --staging-mib to 500 or less",
        ),
        (
            sizes(16, 1024),
            True,
            1200,
            "the worker takes 1296 MiB of host memory (--staging-mib 1024, --capture-mib 16, "
            "--bank-mib 256), but only 1200 MiB are available. Lower --staging-mib to 328 or less",
        ),
        (
            sizes(512, 1024, ranks=2),
            True,
            2400,
            "2 workers take 2560 MiB of host memory (--staging-mib 1024, --capture-mib 512, "
            "--bank-mib 256), but only 2400 MiB are available. Lower --capture-mib and "
            "--staging-mib to 229 or less",
        ),
        (
            sizes(512, 1024, bank=1024),
            True,
            1000,
            "the worker takes 2560 MiB of host memory (--staging-mib 1024, --capture-mib 512, "
            "--bank-mib 1024), but only 1000 MiB are available. Lower --capture-mib and "
            "--staging-mib and --bank-mib",
        ),
    ],
)
def test_an_error_names_the_flags_to_lower_and_values_that_fit(
    wanted: Sizes, cpu: bool, available: int, message: str
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check_host_memory(wanted, cpu=cpu, available=available * MIB)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("available", "remedy"),
    [
        (2432, "Lower --capture-mib to 832 or less"),
        (768, "Lower --capture-mib and --bank-mib"),
    ],
)
def test_a_ring_that_no_device_can_hold_is_refused(available: int, remedy: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        check_device_memory(sizes(2048, 0).settings, available=available * MIB)
    assert str(caught.value) == (
        "a worker takes 2432 MiB of its device's memory (--capture-mib 2048, --bank-mib 256, "
        f"--encode-mib 128), but the engine may take only {available} MiB "
        f"(--gpu-memory-utilization). {remedy}"
    )


def test_a_kv_cache_that_does_not_fit_is_refused_before_the_model_is_loaded() -> None:
    check_kv_cache(100 * MIB, available=100 * MIB)
    with pytest.raises(InvalidConfig, match=r"asks for 101 MiB, but only 100 MiB .* lower it"):
        check_kv_cache(101 * MIB, available=100 * MIB)
