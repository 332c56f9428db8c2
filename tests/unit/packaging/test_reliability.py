"""The page on reliability: every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

from ...documents import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
_NAMED = re.compile(r"`((?:unit|integration|gpu)/[\w/]+\.py)(?:::(\w+))?(?:\[[^`]*\])?`")
NAMED = sorted(set(_NAMED.findall(PAGE)))
_HEAD = "| finding | test | before | after |"


def functions(path: Path) -> set[str]:
    """The functions of a test file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_that_the_page_names_is_there(path: str, name: str) -> None:
    file = ROOT / "tests" / path
    assert file.is_file()
    assert not name or name in functions(file)


def test_every_finding_has_a_test_and_figures() -> None:
    _, *tables = PAGE.split(_HEAD + "\n")
    assert len(tables) == 2
    for table in tables:
        lines = table.partition("\n\n")[0].splitlines()[1:]
        assert len(lines) > 10
        for line in lines:
            _, *cells, _ = line.split(" | ")
            assert len(cells) == 2, line
            assert _NAMED.search(cells[0]), line
            assert all(cell.strip() for cell in line.strip("|").split("|")), line
