"""Dataclasses that are made for each request."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(*, weakref_slot: bool = False) -> Callable[[type[T]], type[T]]:
    """A dataclass with slots that only the type checker treats as frozen.

    With `frozen=True`, an object takes about twice as long to make: each field is set by a call of
    `object.__setattr__`.

    Args:
        weakref_slot: whether weak references to its objects are possible.
    """
    return dataclass(slots=True, unsafe_hash=True, weakref_slot=weakref_slot)
