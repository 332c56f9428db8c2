"""Pages of listings: their sizes, and the token of the next page.

A token is the key of a page's last entry, not a position. So entries added or removed between two
pages cause no repeated or skipped entries, and the server keeps no state for a listing.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import TypeVar

from rheostat_server import validation
from rheostat_server.errors import InvalidValue
from rheostat_server.limits import PAGE_BYTES, PAGE_ENTRIES, PAGE_TOKEN_BYTES

Entry = TypeVar("Entry")

_DEFAULT_ENTRIES = 100

_SEPARATOR = "\0"

_DIGITS = 20
"""The most digits of a number of 64 bits."""


def page_size(requested: int) -> int:
    """The number of entries of a page. If `requested` is 0, the default applies."""
    return min(requested or _DEFAULT_ENTRIES, PAGE_ENTRIES)


def fitting(entries: Sequence[Entry], size: Callable[[Entry], int]) -> Sequence[Entry]:
    """The first entries that fit into a message of about `PAGE_BYTES`; at least one entry.

    Args:
        entries: in the order of the listing.
        size: returns the approximate bytes of an entry's message.
    """
    free = PAGE_BYTES
    for count, entry in enumerate(entries):
        if free <= 0:
            return entries[:count]
        free -= size(entry)
    return entries


def to_token(*key: str) -> str:
    """The token of the page after the entry with this key."""
    return base64.urlsafe_b64encode(_SEPARATOR.join(key).encode()).decode()


def from_token(token: str, parts: int) -> tuple[str, ...]:
    """Decodes a token to the `parts` strings of its key.

    Raises:
        InvalidValue: `to_token` did not make this token.
    """
    validation.text_bytes(token, PAGE_TOKEN_BYTES, "page_token")
    try:
        key = base64.b64decode(token, altchars=b"-_", validate=True).decode().split(_SEPARATOR)
    except (binascii.Error, ValueError) as error:
        raise invalid_token() from error
    if len(key) != parts:
        raise invalid_token()
    return tuple(key)


def parse_number(part: str) -> int:
    """The number in a part of a key.

    Raises:
        InvalidValue: it is no number.
    """
    if not (part.isascii() and part.isdecimal()) or len(part) > _DIGITS:
        raise invalid_token()
    return int(part)


def invalid_token() -> InvalidValue:
    """The error of a token that this server did not make."""
    return InvalidValue("is not a token that this server gave; start anew", field="page_token")
