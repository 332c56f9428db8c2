"""Google's protos below proto/ are those that Python's modules are made of."""

import subprocess
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.rpc import error_details_pb2, status_pb2

from .buf import buf


def test_errors_can_be_decoded_from_the_protos_alone(root: Path) -> None:
    built = subprocess.run(
        [buf(), "build", root / "proto", "--as-file-descriptor-set", "--output", "-"],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    files = {file.name: file for file in FileDescriptorSet.FromString(built).file}
    for module in (status_pb2, error_details_pb2):
        vendored = files[module.DESCRIPTOR.name]
        assert _bare(vendored) == _bare(_copied(module.DESCRIPTOR))


def _copied(descriptor: FileDescriptor) -> FileDescriptorProto:
    copy = FileDescriptorProto()
    descriptor.CopyToProto(copy)
    return copy


def _bare(file: FileDescriptorProto) -> FileDescriptorProto:
    """Without comments, and without names that follow from others."""
    file.ClearField("source_code_info")
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file
