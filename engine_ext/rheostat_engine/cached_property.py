"""`functools.cached_property` without a lock.

Before Python 3.12, all objects of a class share one lock for each such property. While a thread
computed the needs of a large plan, the event loop waited for up to 0.8 s to compute the needs of a
small plan. Without the lock, two threads may both compute the value; the later one is kept.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251
else:

    class cached_property:  # the name that it has in functools
        """A property that is computed once for each object."""

        def __init__(self, compute: Any) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value


__all__ = ["cached_property"]
