"""A decorator for dataclasses of which the server makes an object for each request."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(*, weakref_slot: bool = False) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass with slots. Only the type checker refuses to set its fields.

    With `frozen=True`, making an object takes about twice as long, because `object.__setattr__` is
    called for each field.

    Args:
        weakref_slot: whether objects of the class allow weak references.
    """
    return dataclass(slots=True, unsafe_hash=True, weakref_slot=weakref_slot)
