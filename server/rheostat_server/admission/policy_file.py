"""The file of the server-wide policy (`--policy`), which is in force before the first request.

The file is the JSON form of the answer of `GetGlobal`: a policy and its version. So programs in any
language can write it, with protobuf's own JSON mapping.

Why the start fails
    A server that answered requests without its policy, or with a part of it, would answer them
    unread and unsteered, and nobody would notice. So a file with any error ends the start.
Why the server never writes the file
    The operator owns it. A policy that a client sets later is lost at a restart, and the policy of
    the file is in force again.
"""

import re
from pathlib import Path
from typing import NamedTuple

from google.protobuf import json_format

from rheostat_server.admission.global_steering import GlobalSteeringState, name_policy_field
from rheostat_server.errors import (
    EngineFailed,
    EngineLost,
    NotFound,
    PolicyFailed,
    ResourceExhausted,
    RheostatError,
)
from rheostat_wire.v1 import steering_service_pb2

_LARGEST_VERSION = (1 << 63) - 1
"""Leaves room for later versions, which are uint64."""

_FIELD = re.compile(r"Failed to parse (\w+) field: ")
"""What protobuf writes before an error, once for each message around it."""
_PATH = re.compile(r' at "?GetGlobalResponse\.?([\w.\[\]]*?)"?\.*$')
"""The path that protobuf writes after most errors."""
_UNKNOWN = re.compile(r'has no field named "(.*?)"')
_AVAILABLE = re.compile(r"\s+Available Fields\(except extensions\): (.*)")

_ADVICE = "Correct the file"
_NOT_FOUND_ADVICE = (
    "Put the vector's numbers into the file, as rheostat global export does, or give the server "
    "the --vector-dir that holds the vector"
)
_EXHAUSTED_ADVICE = "Make the policy smaller, or give the server more memory"


class PolicyFile(NamedTuple):
    """The content of a policy file."""

    path: str
    policy: steering_service_pb2.Policy
    version: int
    """1 to 2^63 - 1."""


def read_policy(path: str) -> PolicyFile:
    """Reads a policy file. Its policy is checked by `put_in_force`, which needs the model.

    Raises:
        PolicyFailed: the file cannot be read, is not JSON of this form, or has no policy or
            version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PolicyFailed(f"--policy {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _failed(path, "", f"it is not UTF-8 at byte {error.start}") from error
    if not text.strip():
        # `check_start` reads the file too, before the server listens.
        raise _failed(path, "", "it is empty; a pipe cannot be used, because it is read twice")
    if not text.lstrip().startswith("{"):
        raise _failed(path, "", "it does not begin with {, so it is not a JSON object")
    answer = steering_service_pb2.GetGlobalResponse()
    try:
        json_format.Parse(text, answer)
    except json_format.ParseError as error:
        raise _failed(path, *_parse_error(str(error))) from error
    policy = answer.policy
    if not (policy.steering.interventions or policy.rules):
        raise _failed(
            path,
            "policy",
            "it has neither interventions (steering.interventions) nor rules, so it would enforce "
            "nothing",
            "Add some, or start without --policy",
        )
    if not 1 <= answer.version <= _LARGEST_VERSION:
        raise _failed(
            path,
            "version",
            f"a number from 1 to {_LARGEST_VERSION} is required, which receipts show",
            "Write one, and increment it with each change of the file",
        )
    return PolicyFile(path, policy, answer.version)


async def put_in_force(file: PolicyFile, state: GlobalSteeringState) -> None:
    """Puts the policy of a file in force.

    Raises:
        PolicyFailed: the model cannot be steered or read like this, a vector is not stored, or
            there is too little memory for the policy.
        EngineFailed: the engine is gone.
    """
    try:
        await state.start_with(file.policy, file.version, file.path)
    except EngineLost as error:
        raise EngineFailed(error.message) from error
    except RheostatError as error:
        name_policy_field(error)
        advice = _ADVICE
        if isinstance(error, NotFound):
            advice = _NOT_FOUND_ADVICE
        elif isinstance(error, ResourceExhausted):
            advice = _EXHAUSTED_ADVICE
        raise _failed(file.path, error.field, error.message, advice) from error


def _failed(path: str, field: str, message: str, advice: str = _ADVICE) -> PolicyFailed:
    where = f"{field}: " if field else ""
    return PolicyFailed(f"--policy {path}: {where}{message}. {advice}")


def _parse_error(text: str) -> tuple[str, str]:
    """The field and the message of an error of protobuf's parser.

    Protobuf's versions word some errors differently. A wording that is not recognised stays as it
    is, on one line.
    """
    available = _AVAILABLE.search(text)
    fields = re.findall(r"'(\w+)'", available[1]) if available else []
    text = _AVAILABLE.sub("", text).rstrip(". \n")
    field = ".".join(_FIELD.findall(text))
    text = _FIELD.sub("", text)
    if (found := _PATH.search(text)) is not None:
        field, text = found[1] or field, text[: found.start()]
    if (unknown := _UNKNOWN.search(text)) is not None:
        field = f"{field}.{unknown[1]}" if field else unknown[1]
        text = "there is no such field"
        if fields:
            text += f", but {', '.join(fields)}"
    return field, " ".join(text.split())
