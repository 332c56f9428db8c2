"""A device must have the memory for our buffers beside the weights."""

from types import SimpleNamespace

import pytest
import torch

from rheostat_engine import EngineSettings
from rheostat_engine.adapters.device_memory import check_device_memory
from rheostat_engine.sites.block_layout import SiteError

MIB = 1 << 20
DEVICE = torch.device("cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The memory of a device, in MiB: 20,000 of 24,000 are free, besides 1,000 in torch's cache."""
    memory = {"free": 20_000, "total": 24_000, "reserved": 4000, "allocated": 3000}
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (memory["free"] * MIB, memory["total"] * MIB)
    )
    for name in ("reserved", "allocated"):
        monkeypatch.setattr(torch.cuda, f"memory_{name}", lambda _, name=name: memory[name] * MIB)
    return memory


def check(ring: int, *, weights: int = 3000, cache: int | None = None) -> None:
    settings = EngineSettings("ipc:///a", capture_bytes=ring * MIB, bank_bytes=256 * MIB)
    caches = SimpleNamespace(kv_cache_memory_bytes=cache, gpu_memory_utilization=0.5)
    config = SimpleNamespace(additional_config=settings, cache_config=caches)
    check_device_memory(config, DEVICE, weights * MIB)


@pytest.mark.usefixtures("device")
def test_the_engine_may_take_a_part_of_the_device() -> None:
    check(12_000 - 3000 - 256 - 1)
    with pytest.raises(SiteError) as caught:
        check(12_000 - 3000 - 256)
    assert str(caught.value) == (
        "captured rows (--capture-mib 8744) and steering (--bank-mib 256) do not fit into the 9000 "
        "MiB of the device's memory that the model leaves to the engine "
        "(--gpu-memory-utilization). Lower --capture-mib to 4244 or less"
    )


@pytest.mark.usefixtures("device")
def test_the_engine_may_take_all_if_the_size_of_its_cache_was_given() -> None:
    check(21_000 - 256 - 1, cache=1)
    with pytest.raises(SiteError, match="the 21000 MiB"):
        check(21_000 - 256, cache=1)


def test_others_leave_less_of_the_device(device: dict[str, int]) -> None:
    device["free"] = 1000
    check(2000 - 256 - 1)
    with pytest.raises(SiteError, match="the 2000 MiB"):
        check(2000 - 256)


@pytest.mark.usefixtures("device")
def test_a_model_that_leaves_nothing_is_no_matter_of_the_ring_alone() -> None:
    with pytest.raises(SiteError, match=r"the 0 MiB .* Lower both$"):
        check(1, weights=13_000)


def test_other_engines_of_the_process_do_not_count_as_weights(device: dict[str, int]) -> None:
    device["allocated"], device["reserved"] = 13_000, 14_000
    check(8743)
