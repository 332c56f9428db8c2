"""Checks of single fields, with the path that an error names.

A path reads like the request: "steering.interventions[2].where.include[0].positions".
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence

from google.protobuf.message import Message

from rheostat_server.errors import InvalidValue, MissingField, NonFinite, UnknownEnum, UnknownToken
from rheostat_server.limits import ID_BYTES, LABEL_KEY_BYTES, LABEL_VALUE_BYTES, LABELS

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Ids of requests."""

VECTOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
"""Names of vectors."""

PROBE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of probes."""


def counted(count: int, noun: str) -> str:
    """As "1 row" or "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def field_path(path: str, field: str) -> str:
    """The path of a field below another."""
    return f"{path}.{field}" if path else field


def required(chosen: str | None, path: str, options: str) -> str:
    """The name of the member of a oneof that is set.

    Raises:
        MissingField: no member is set.
    """
    if chosen is None:
        raise MissingField(f"one of {options} is required", field=path)
    return chosen


def known_enum(value: int, values: Collection[int], path: str) -> None:
    """Checks an enum.

    Raises:
        UnknownEnum: the value is zero or unknown.
    """
    if value == 0 or value not in values:
        raise UnknownEnum(f"{value} is not a value that can be used here", field=path)


def finite(value: float, path: str) -> float:
    """Returns the value, if it is finite.

    Raises:
        NonFinite: the value is infinite or not a number.
    """
    if not math.isfinite(value):
        raise NonFinite("must be a finite number", field=path)
    return value


def optional_number(message: Message, name: str, path: str, default: float) -> float:
    """A field of a message at `path`, or the default if it is not set.

    Raises:
        NonFinite: the number is infinite or not a number.
    """
    if not message.HasField(name):
        return default
    return finite(getattr(message, name), field_path(path, name))


def check_count(count: int, limit: int, path: str, noun: str) -> None:
    """Checks a count.

    Raises:
        InvalidValue: there are too many.
    """
    if count > limit:
        raise InvalidValue(f"{count} {noun}; at most {limit} are allowed", field=path)


def text_bytes(text: str, limit: int, path: str) -> None:
    """Checks the length of a text in UTF-8.

    Raises:
        InvalidValue: the text is longer than `limit` bytes.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise InvalidValue(f"has {size} bytes; at most {limit} are allowed", field=path)


def no_repeats(values: Sequence[int], path: str, noun: str) -> None:
    """Checks that all values differ.

    Raises:
        InvalidValue: a value is repeated.
    """
    if len(set(values)) != len(values):
        raise InvalidValue(f"{noun} may not be repeated", field=path)


def matches(value: str, pattern: re.Pattern[str], path: str) -> str:
    """Returns the value, if it has the form of the pattern.

    Raises:
        InvalidValue: the value does not match, or it is longer than a name may be.
    """
    text_bytes(value, ID_BYTES, path)
    if not pattern.fullmatch(value):
        raise InvalidValue(f"must be of the form {pattern.pattern}", field=path)
    return value


def labels(labels_by_key: Mapping[str, str], path: str) -> None:
    """Checks labels of requests.

    Raises:
        InvalidValue: there are too many, or a key or value is too long.
    """
    check_count(len(labels_by_key), LABELS, path, "labels")
    for key, value in labels_by_key.items():
        if not 1 <= len(key.encode()) <= LABEL_KEY_BYTES:
            raise InvalidValue(f"a label's key has 1 to {LABEL_KEY_BYTES} bytes", field=path)
        if len(value.encode()) > LABEL_VALUE_BYTES:
            raise InvalidValue(
                f"a label's value has at most {LABEL_VALUE_BYTES} bytes", field=f"{path}[{key}]"
            )


def token_ids(ids: Sequence[int], vocabulary: int, path: str) -> None:
    """Checks token ids.

    Raises:
        MissingField: there are none.
        UnknownToken: an id is not below the vocabulary's size.
    """
    if not ids:
        raise MissingField("at least one token id is required", field=path)
    if max(ids) >= vocabulary:
        index = next(i for i, token in enumerate(ids) if token >= vocabulary)
        token_id(ids[index], vocabulary, f"{path}[{index}]")


def token_id(token: int, vocabulary: int, path: str) -> None:
    """Checks a token id.

    Raises:
        UnknownToken: it is not below the vocabulary's size.
    """
    if token >= vocabulary:
        raise UnknownToken(
            f"token {token} is not below the vocabulary's size, {vocabulary}", field=path
        )
