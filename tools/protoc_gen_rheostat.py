"""A buf plugin that makes the Python package `rheostat_wire.v1` from the `rheostat.v1` schemas.

protoc makes the messages, grpcio-tools the gRPC stubs, and mypy-protobuf the types of both. This
module only moves Python modules from `rheostat.v1.*` to `rheostat_wire.v1.*`, because a top-level
package must not be split between generated and written code. Descriptors keep their file names
(`rheostat/v1/*.proto`), which reflection shows.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.compiler import plugin_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet

SOURCE_FOLDER = "rheostat/v1/"
SOURCE_PACKAGE = "rheostat.v1"
TARGET_PACKAGE = "rheostat_wire.v1"
INITS = {
    "__init__.py": '"""Modules generated from the `rheostat.v1` schemas by tools/generate."""\n',
}

_IMPORT = re.compile(rf"^from {re.escape(SOURCE_PACKAGE)} import ", re.MULTILINE)
_BUILT_MODULE = re.compile(
    rf"(?<=DESCRIPTOR, '){re.escape(SOURCE_PACKAGE)}(?=\.\w+_pb2', _globals\))"
)
_LEFT_OVER = re.compile(
    rf"(?:import|from) {re.escape(SOURCE_PACKAGE)}\b|'{re.escape(SOURCE_PACKAGE)}\.\w+_pb2'"
)


def relocate(source: str) -> str:
    """Returns the text of a generated module with its package moved.

    Raises ValueError if a generator refers to the package in an unknown way.
    """
    source = _IMPORT.sub(f"from {TARGET_PACKAGE} import ", source)
    source = _BUILT_MODULE.sub(TARGET_PACKAGE, source)
    if found := _LEFT_OVER.search(source):
        raise ValueError(f"unknown reference to {SOURCE_PACKAGE}: {found.group()!r}")
    return source


def compile_with_protoc(
    request: plugin_pb2.CodeGeneratorRequest, option: str, names: list[str]
) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of what grpcio-tools' protoc writes for `option`, e.g. "--python_out"."""
    with tempfile.TemporaryDirectory() as folder:
        descriptors = Path(folder, "descriptors.binpb")
        descriptors.write_bytes(FileDescriptorSet(file=request.proto_file).SerializeToString())
        out = Path(folder, "out")
        out.mkdir()
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc"),
                f"--descriptor_set_in={descriptors}",
                f"{option}={out}",
                *names,
            ],
            check=True,
            stdout=sys.stderr,
        )
        for path in sorted(out.rglob("*.py")):
            yield path.relative_to(out).as_posix(), path.read_text(encoding="utf-8")


def compile_with_plugin(
    request: plugin_pb2.CodeGeneratorRequest, entry: str, names: list[str]
) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of what mypy-protobuf makes; `entry` names its function."""
    narrowed = plugin_pb2.CodeGeneratorRequest()
    narrowed.CopyFrom(request)
    narrowed.file_to_generate[:] = names
    narrowed.parameter = "quiet,generate_concrete_servicer_stubs"
    output = subprocess.run(
        [sys.executable, "-c", f"from mypy_protobuf.main import {entry}; {entry}()"],
        input=narrowed.SerializeToString(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    response = plugin_pb2.CodeGeneratorResponse.FromString(output)
    if response.error:
        raise ValueError(response.error)
    for file in response.file:
        yield file.name, file.content


def generate(request: plugin_pb2.CodeGeneratorRequest) -> dict[str, str]:
    """Returns the text of every file of the package, by path below `rheostat_wire/v1`."""
    names = sorted(request.file_to_generate)
    if strangers := [name for name in names if not name.startswith(SOURCE_FOLDER)]:
        raise ValueError(f"outside {SOURCE_FOLDER}: {strangers}")
    with_services = sorted(
        file.name for file in request.proto_file if file.name in names and file.service
    )
    files = dict(INITS)
    for made in (
        compile_with_protoc(request, "--python_out", names),
        compile_with_protoc(request, "--grpc_python_out", with_services),
        compile_with_plugin(request, "main", names),
        compile_with_plugin(request, "grpc", with_services),
    ):
        for path, text in made:
            files[path.removeprefix(SOURCE_FOLDER)] = relocate(text)
    return files


def main() -> None:
    """Answers protoc's plugin protocol: a CodeGeneratorRequest on stdin, a response on stdout."""
    request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
    response = plugin_pb2.CodeGeneratorResponse(
        supported_features=plugin_pb2.CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL
    )
    for path, text in sorted(generate(request).items()):
        response.file.add(name=path, content=text)
    sys.stdout.buffer.write(response.SerializeToString())


if __name__ == "__main__":
    main()
