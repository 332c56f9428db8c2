"""The benchmark of a stalled subscriber: what its figures are, and that the page shows them."""

import json
from pathlib import Path

import pytest

from rheostat_bench.stalled import ARMS, Turn, summary

from .pages import DOCS, PAGES


def turn(tokens: int, longest: float = 1.0) -> Turn:
    return Turn(10.0, tokens, longest, 0, 0)


def test_every_arm_is_set_beside_nobody() -> None:
    turns = [[turn(1000), turn(3000), turn(2000)], *([[turn(1500, 2.0), turn(1700)]] * 3)]
    table = summary(turns)
    assert list(table) == [arm.name for arm in ARMS]
    assert table["nobody watches"] == {
        "tokens_per_s": 200.0,
        "lowest": 100.0,
        "highest": 300.0,
        "percent": 100.0,
        "longest_request_s": 1.0,
    }
    assert table["reads"] == {
        "tokens_per_s": 160.0,
        "lowest": 150.0,
        "highest": 170.0,
        "percent": 80.0,
        "longest_request_s": 2.0,
    }


def test_one_stood_still_for_a_minute() -> None:
    result = json.loads((DOCS / "cpu" / "stalled.json").read_text())
    assert result["seconds"] >= 60


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*/stalled.json")), ids=lambda path: path.parent.name
)
def test_the_page_shows_the_file(path: Path) -> None:
    result = json.loads(path.read_text())
    turns = [[Turn(**one) for one in result["turns"][arm.name]] for arm in ARMS]
    assert summary(turns) == result["summary"]
    for name, row in result["summary"].items():
        line = (
            f"| {name} | {row['tokens_per_s']:.0f} | {row['lowest']:.0f} to {row['highest']:.0f} "
            f"| {row['percent']:.0f} % | {row['longest_request_s']:.1f} s |"
        )
        assert line in PAGES
