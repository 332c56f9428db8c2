"""Sizes that a configuration leaves open follow from the tokens of a step."""

import pytest

from rheostat_server.config import ServerConfig

MIB = 1 << 20


@pytest.mark.parametrize(
    ("step", "ring", "staging"),
    [
        (16, 512, 1024),
        (2048, 512, 1024),
        (4096, 1024, 2048),
        (8192, 2048, 4096),
        (16384, 2048, 4096),
    ],
)
def test_a_ring_holds_as_many_layers_of_large_steps_as_of_small_ones(
    step: int, ring: int, staging: int
) -> None:
    config = ServerConfig(model="toy")
    assert config.ring_bytes(step) == ring * MIB
    assert config.staging_area_bytes(step) == staging * MIB


@pytest.mark.parametrize(
    ("ring", "staging"), [(16, 1024), (512, 1024), (1024, 2048), (2048, 4096), (8192, 8192)]
)
def test_a_staging_area_holds_two_rings_within_limits_and_always_one(
    ring: int, staging: int
) -> None:
    config = ServerConfig(model="toy", capture_bytes=ring * MIB)
    for step in (16, 8192):
        assert config.ring_bytes(step) == ring * MIB
        assert config.staging_area_bytes(step) == staging * MIB


def test_a_size_that_was_given_is_kept() -> None:
    config = ServerConfig(model="toy", staging_bytes=5 * MIB)
    assert config.staging_area_bytes(8192) == 5 * MIB


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, 2048),
        ({"capture_bytes": 16 * MIB}, 512),
        ({"capture_bytes": 700 * MIB}, 700),
        ({"capture_bytes": 8192 * MIB}, 2048),
        ({"buffers_bytes": 600 * MIB}, 600),
        ({"buffers_bytes": 64 * MIB}, 512),
        ({"request_buffer_bytes": 3 * MIB}, 3),
    ],
)
def test_the_rows_of_a_step_fit_into_the_memory_of_their_request(
    given: dict[str, int], limit: int
) -> None:
    assert ServerConfig(model="toy", **given).request_limit_bytes(8192) == limit * MIB
