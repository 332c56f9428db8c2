"""The client's folders import only downwards, and no modules import each other in a circle.

A folder may import what stands to its left in `LAYERS`. `rheostat` itself, which a program imports,
stands above the folders that it exports from.
"""

from collections.abc import Iterator
from pathlib import Path

from .imports import imports_in

PACKAGE = Path("clients/python/rheostat")
LAYERS = (
    "rheostat._steering",
    "rheostat._capture",
    "rheostat._responses",
    "rheostat._sweeps",
    "rheostat._connection",
    "rheostat._event_streams",
    "rheostat._subscriptions",
    "rheostat._watches",
    "rheostat._client",
    "rheostat._files",
    "rheostat.captures",
    "rheostat.aio",
    "rheostat",
    "rheostat._cli",
    "rheostat.__main__",
)
# Modules beside the folders, which every folder may import. They may import each other.
GROUND = (
    "rheostat._arrays",
    "rheostat._errors",
    "rheostat._fields",
    "rheostat._notebook",
    "rheostat._points",
    "rheostat._positions",
    "rheostat._prompts",
    "rheostat._runs",
    "rheostat._selectors",
)

Modules = dict[str, set[str]]


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph(root: Path) -> Modules:
    """Each module of the client, and the modules of the client that it imports."""
    folder = root / PACKAGE
    modules = {module_of(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}
    found: Modules = {module: set() for module in modules}
    for used in imports_in(folder, below=folder.parent):
        parts = used.name.split(".")
        names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        module = next((name for name in names if name in modules), None)
        if module is not None:
            found[module_of(used.path)].add(module)
    return found


def layer_of(module: str) -> int:
    """0 for the ground, else the layer, counted from 1."""
    if module in GROUND:
        return 0
    if module == "rheostat":
        return LAYERS.index(module) + 1
    (layer,) = (
        number
        for number, name in enumerate(LAYERS, 1)
        if name != "rheostat" and (module == name or module.startswith(f"{name}."))
    )
    return layer


def circles(modules: Modules) -> Iterator[list[str]]:
    """A path from a module back to itself, for each module that has one."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in done:
            for used in sorted(modules[module]):
                yield from visit(used, [*path, module])
            done.add(module)

    for module in sorted(modules):
        yield from visit(module, [])


def test_every_module_belongs_to_a_layer(root: Path) -> None:
    assert {layer_of(module) for module in graph(root)} == set(range(len(LAYERS) + 1))


def test_imports_only_lead_downwards(root: Path) -> None:
    upwards = [
        f"{module} imports {used}"
        for module, imported in graph(root).items()
        for used in imported
        if layer_of(used) > layer_of(module)
    ]
    assert sorted(upwards) == []


def test_no_module_imports_one_that_needs_it(root: Path) -> None:
    assert list(circles(graph(root))) == []


def test_a_circle_is_found() -> None:
    modules = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert list(circles(modules)) == [["b", "c", "b"]]
