"""Checks of single values against the range of their protobuf fields.

Errors that protobuf raises never leave this package: common mistakes are checked here by name, and
`builds_message` turns all others into InvalidRequest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from operator import index
from types import MappingProxyType
from typing import Any, ParamSpec, SupportsIndex, TypeVar

from google.protobuf.descriptor import EnumDescriptor

from rheostat._errors import InvalidRequest, invalid

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep127")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_PROBE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Parameters = ParamSpec("_Parameters")
_Message = TypeVar("_Message")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
Number = TypeVar("Number", bound=int)


def whole_number(
    number: SupportsIndex,
    path: str,
    what: str,
    *,
    least: int = 0,
    most: int = UINT32,
    reason: str = "REASON_INVALID_VALUE",
) -> int:
    """Returns ``number`` if it is an integer in the range; ``what`` names it in errors."""
    try:
        value = index(number)
    except TypeError:
        raise invalid(path, f"{what} is a whole number, not {number!r}") from None
    if not least <= value <= most:
        raise invalid(path, f"{what} is {least} to {most}, not {value}", reason)
    return value


def token_id(number: SupportsIndex, path: str) -> int:
    """Returns ``number`` if it can be the id of a token."""
    if isinstance(number, str):
        raise invalid(
            path,
            f"a token id is a whole number, not {number!r}; "
            "engine.tokenize(text, special_tokens=False) gives those of a text",
        )
    return whole_number(number, path, "a token id", reason="REASON_UNKNOWN_TOKEN")


def token_id_list(given: object, path: str, name: str) -> list[int]:
    """The token ids of an argument, which ``name`` names in errors."""
    if isinstance(given, str):
        raise invalid(
            path,
            f"{name} is a list of token ids, not {given!r}; "
            f"engine.tokenize({given!r}, special_tokens=False).token_ids is that of a text",
        )
    if not isinstance(given, Iterable):
        raise invalid(path, f"{name} is a list of token ids, not {given!r}")
    return [token_id(token, f"{path}[{number}]") for number, token in enumerate(given)]


def flag(given: object, path: str, name: str) -> bool:
    """Returns ``given`` as a bool if it equals True or False, or is None: False.

    ``name`` names it in errors.
    """
    if given not in (None, True, False):
        raise invalid(path, f"{name} is True or False, not {given!r}")
    return bool(given)


def with_paths(items: Iterable[_Item], path: str) -> Iterator[tuple[_Item, str]]:
    """Each item of a repeated field with its own path, as "interventions[0]"."""
    for number, item in enumerate(items):
        yield item, f"{path}[{number}]"


def word(given: object, words: Mapping[str, Number], path: str) -> Number:
    """The enum's value that a word means. The last part of ``path`` names the argument."""
    if not isinstance(given, str) or given not in words:
        raise invalid(
            path,
            f"{path.rpartition('.')[2]} is {' or '.join(map(repr, words))}, not {given!r}",
            "REASON_UNKNOWN_ENUM",
        )
    return words[given]


def did_you_mean(
    word: str, words: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> str:
    """As ": did you mean 'layers'?"; empty if no word is similar.

    ``elsewhere`` maps names in other libraries to names in this library.
    """
    matches = [elsewhere[word]] if word in elsewhere else get_close_matches(word, words, 1, 0.7)
    return f": did you mean {matches[0]!r}?" if matches else ""


def check_arguments(call: str, unknown: Iterable[str], names: Collection[str]) -> None:
    """Raise TypeError if ``call`` was given arguments other than ``names``."""
    for name in unknown:
        hint = did_you_mean(name, names) or f"; it has {', '.join(names)}"
        raise TypeError(f"{call}() has no argument {name!r}{hint}")


def counted(count: int, noun: str) -> str:
    """As "1 row" or "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def checks_arguments(
    method: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Makes a function answer an unknown argument with the name that was probably meant."""
    names = [name for name in signature(method).parameters if name != "self"]

    @wraps(method)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        unknown = [name for name in kwargs if name not in names]
        check_arguments(method.__name__, unknown, names)
        return method(*args, **kwargs)

    return checked


def utf8_text(value: object, path: str, what: str) -> str:
    """Returns ``value`` if it is a text that UTF-8 can encode; ``what`` names it in errors."""
    if not isinstance(value, str):
        raise invalid(path, f"{what} is a text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            path,
            f"{what} has half a character at {error.start}, U+{ord(value[error.start]):04X}, which "
            "UTF-8 cannot encode: remove it, or decode the bytes with their own encoding",
        ) from None
    return value


def is_finite(number: float) -> bool:
    """Whether a number is finite in float32, as the numbers of requests must be."""
    return abs(number) <= _LARGEST_FLOAT32  # false for nan


def vector_name(name: str, path: str = "name") -> str:
    """Returns ``name`` if it is valid for a vector."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            path, f"{name!r} is no name: 1 to 128 of [A-Za-z0-9._/-], first a letter or digit"
        )
    return name


def is_probe_name(name: object) -> bool:
    """Whether ``name`` is valid for a probe or a rule."""
    return isinstance(name, str) and _PROBE_NAME.fullmatch(name) is not None


def probe_name(name: str, path: str) -> str:
    """Returns ``name`` if it is valid for a probe or a rule."""
    if not is_probe_name(name):
        raise invalid(
            path, f"{name!r} is no name: 1 to 64 of [A-Za-z0-9._-], first a letter or digit"
        )
    return name


def vector_digest(digest: str, path: str = "digest") -> bytes:
    """The 32 bytes of ``digest``, 64 hex digits."""
    try:
        data = bytes.fromhex(digest)
    except (TypeError, ValueError):
        data = b""
    if len(data) != 32:
        raise invalid(path, f"a digest is 64 hex digits, not {digest!r}")
    return data


def builds_message(
    build: Callable[_Parameters, _Message],
) -> Callable[_Parameters, _Message]:
    """Makes ``build`` raise InvalidRequest if an argument does not fit the field of a message."""

    @wraps(build)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Message:
        try:
            return build(*args, **kwargs)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"the request cannot be encoded, because a value has the wrong type: {error}",
                reason="REASON_INVALID_VALUE",
            ) from error

    return checked


def read_word(enum: EnumDescriptor, number: int, prefix: str) -> str:
    """An enum value as a word: OP_NORM_ADD is "norm_add"; a value of newer servers "unknown 9"."""
    value = enum.values_by_number.get(number)
    return f"unknown {number}" if value is None else value.name.removeprefix(prefix).lower()


def same_fields(kind: type, source: object) -> dict[str, Any]:
    """The numbers and texts of a message or object whose names are also fields of a dataclass."""
    values = ((field.name, getattr(source, field.name, None)) for field in fields(kind))
    return {name: value for name, value in values if isinstance(value, bool | int | float | str)}
