"""Listings: a table for people, one JSON document for programs (``--json``)."""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeAlias

import numpy as np

from rheostat._cli._common import warn
from rheostat._notebook import text_table

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"
"""A value that JSON can represent."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def print_json(value: object) -> None:
    """Print a result as JSON: dataclasses and named tuples as objects, arrays as lists.

    Ranges have their start and stop, and times are in ISO.
    """
    print(json_text(value))


def json_text(value: object) -> str:
    """A result as an indented JSON document, as in `print_json`."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], what: str) -> None:
    """Print a table; without rows, print on stderr that no ``what`` are stored."""
    if rows:
        print(text_table([head, *rows]))
    else:
        warn(f"no {what} are stored")


def plain(value: object) -> Plain:
    """Converts a value to JSON's types; values of other types become text.

    Numbers that are not finite become None, because JSON does not have them.
    """
    match value:
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float():
            return value
        case str():
            return str(value)
        case range():
            return {"start": value.start, "stop": value.stop}
        case datetime.datetime():
            return value.isoformat()
        case Mapping():
            return {str(key): plain(element) for key, element in value.items()}
        case tuple() if hasattr(value, "_asdict"):  # a named tuple
            return plain(value._asdict())
        case np.ndarray():
            return plain(value.tolist())
        case list() | tuple():
            return [plain(element) for element in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {element.name: plain(getattr(value, element.name)) for element in fields(value)}
    return str(value)
