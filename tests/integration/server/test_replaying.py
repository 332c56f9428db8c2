"""Requests of all kinds under stress have the rows that each of them has alone."""

import asyncio

import pytest

import rheostat

from .conftest import Server
from .replaying import play

pytestmark = pytest.mark.integration


def test_rows_under_stress_are_those_of_the_same_tokens_alone(
    small_server: Server, small: rheostat.Engine
) -> None:
    verdict = asyncio.run(play(small_server.target, 0, ["ada", "bob"]))
    assert verdict.problems() == []
    assert verdict.compared > 10_000
