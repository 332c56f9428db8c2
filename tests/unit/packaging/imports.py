"""What a module imports, read from its source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One imported name: `from a.b import c` is `a.b.c`."""

    path: Path
    line: int
    name: str
    lazy: bool  # inside a function

    def below(self, *packages: str) -> bool:
        """Whether it lies in one of these packages, or is one."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in packages)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


class _Reader(ast.NodeVisitor):
    def __init__(self, path: Path, package: tuple[str, ...]) -> None:
        self.path = path
        self.package = package
        self.depth = 0
        self.found: list[Import] = []

    def note(self, node: ast.stmt, name: str) -> None:
        self.found.append(Import(self.path, node.lineno, name, self.depth > 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.note(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) + 1 - node.level] if node.level else ()
        for alias in node.names:
            self.note(node, ".".join([*base, *filter(None, [node.module]), alias.name]))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef


def imports_of(source: Path, package: str, *, below: Path) -> list[Import]:
    """The imports of the module `source`, which belongs to `package`; paths relative to `below`."""
    reader = _Reader(source.relative_to(below), tuple(package.split(".")))
    reader.visit(ast.parse(source.read_text(encoding="utf-8")))
    return reader.found


def imports_in(package: Path, *, below: Path) -> Iterator[Import]:
    """The imports of every hand-written module of a package's folder."""
    for source in sorted(package.rglob("*.py")):
        folders = source.parent.relative_to(package.parent).parts
        if folders != ("rheostat_wire", "v1"):
            yield from imports_of(source, ".".join(folders), below=below)
