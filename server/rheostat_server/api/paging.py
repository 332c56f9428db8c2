"""Pages of listings: their sizes, and the tokens that lead from one to the next.

A token is the key of a page's last entry, not a position. So entries that come or go between two
pages neither repeat others nor hide them, and the server remembers nothing of a listing.
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


def page_size(asked: int) -> int:
    """How many entries a page has if a request asks for `asked`; 0: it asks for no number."""
    return min(asked or _DEFAULT_ENTRIES, PAGE_ENTRIES)


def fitting(entries: Sequence[Entry], size: Callable[[Entry], int]) -> Sequence[Entry]:
    """The first entries, as many as make a message of about `PAGE_BYTES`; one at least.

    Args:
        entries: in the order of the listing.
        size: bytes of an entry's message, about.
    """
    left = PAGE_BYTES
    for count, entry in enumerate(entries):
        if left <= 0:
            return entries[:count]
        left -= size(entry)
    return entries


def to_token(*key: str) -> str:
    """The token of the page after the entry with this key."""
    return base64.urlsafe_b64encode(_SEPARATOR.join(key).encode()).decode()


def from_token(token: str, parts: int) -> tuple[str, ...]:
    """The key of which `to_token` made a token; it has `parts` strings.

    Raises:
        InvalidValue: this server made no such token.
    """
    validation.text_bytes(token, PAGE_TOKEN_BYTES, "page_token")
    try:
        key = base64.b64decode(token, altchars=b"-_", validate=True).decode().split(_SEPARATOR)
    except (binascii.Error, ValueError) as error:
        raise no_token() from error
    if len(key) != parts:
        raise no_token()
    return tuple(key)


def no_token() -> InvalidValue:
    """The error of a token that this server did not make."""
    return InvalidValue("is not a token that this server gave; start anew", field="page_token")
