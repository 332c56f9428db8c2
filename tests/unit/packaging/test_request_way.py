"""The page that follows a request names modules that exist, and few of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "requests.md").read_text()
FOLDERS = {"engine:": "engine_ext/rheostat_engine", "": "server/rheostat_server"}


def stops(heading: str) -> list[str]:
    """The modules of one table, in order."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", section, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    return [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]


MOST_STOPS = {
    "From the rpc to the worker": 30,
    "From a token to the client": 15,
    "From a site to the client": 15,
}


def test_every_stop_is_a_module() -> None:
    for heading in MOST_STOPS:
        for name in stops(heading):
            prefix, _, path = name.rpartition(":")
            folder = ROOT / FOLDERS[f"{prefix}:" if prefix else ""]
            assert (folder / f"{path}.py").is_file(), name


def test_the_ways_are_short() -> None:
    for heading, most in MOST_STOPS.items():
        assert 1 < len(stops(heading)) <= most, heading
