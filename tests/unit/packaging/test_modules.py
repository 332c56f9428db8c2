"""Modules stay small, and nothing is hidden from the type checker without a reason."""

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

LONGEST = 600  # lines: a longer module surely holds two ideas
FOLDERS = ("clients/python", "server", "engine_ext", "bench", "tests", "tools")
EXPLAINED = re.compile(r"# type: ignore\[[a-z, -]+\]  # \S.*")


def modules(root: Path) -> Iterator[Path]:
    """Every hand-written module."""
    yield from (root / "tools").glob("[a-z]*[!.txt]")
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            if path.parent.parts[-2:] != ("rheostat_wire", "v1"):
                yield path


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Comments of a module by line; none if no comment can be about types."""
    if b"type: ignore" not in path.read_bytes():  # reading takes a hundredth of the time
        return
    with tokenize.open(path) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_no_module_is_longer_than_the_longest_allowed(root: Path) -> None:
    lengths = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules(root)
        if path.is_file()
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
    assert len(lengths) > 50


def unexplained(path: Path) -> list[tuple[int, str]]:
    return [
        (line, text)
        for line, text in comments(path)
        if "type: ignore" in text and not EXPLAINED.fullmatch(text)
    ]


def test_every_type_ignore_names_its_error_and_its_reason(root: Path) -> None:
    found = {
        str(path.relative_to(root)): unexplained(path) for path in modules(root) if path.is_file()
    }
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize(
    ("comment", "accepted"),
    [
        ("# type: ignore", False),
        ("# type: ignore  # because", False),
        ("# type: ignore[misc]", False),
        ("# type: ignore[misc]  # vLLM's base class is untyped", True),
        ("# type: ignore[misc, arg-type]  # two at once", True),
    ],
)
def test_an_ignore_is_accepted_only_with_both(tmp_path: Path, comment: str, accepted: bool) -> None:
    source = tmp_path / "module.py"
    source.write_text(f"x = 1  {comment}\n")
    assert (unexplained(source) == []) is accepted
