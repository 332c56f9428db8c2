"""Running one block again and again, and watching or changing what passes through its modules.

Invariant: every patch is undone when its context ends, whatever happens within.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import nn

Value = object
Args = tuple[Value, ...]
Kwargs = dict[str, Value]
_T = TypeVar("_T")
Forward = Callable[..., Value]


class Around(Protocol):
    """Stands in for a module's forward."""

    def __call__(self, forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        """Returns what the module should return."""


@contextmanager
def patched(around: dict[nn.Module, Around]) -> Iterator[None]:
    """Passes calls of the modules' `forward` through the given functions in the `with` block."""
    own = {module: module.__dict__.get("forward") for module in around}
    try:
        for module, function in around.items():
            module.__dict__["forward"] = _wrap(module.forward, function)
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _wrap(forward: Forward, around: Around) -> Forward:
    def call(*args: Value, **kwargs: Value) -> Value:
        return around(forward, args, kwargs)

    return call


@dataclass
class Call:
    """A recorded call of a module."""

    module: nn.Module
    args: Args
    """Copies of its arguments, with cloned tensors."""
    kwargs: Kwargs
    out: Value = None
    """Copy of its result."""


@dataclass
class Trace:
    """Recorded calls."""

    calls: list[Call] = field(default_factory=list)
    """In the order in which they began."""
    ended: list[Call] = field(default_factory=list)
    """In the order in which they ended."""

    def watch(self, module: nn.Module) -> Around:
        """Records the module's calls and changes nothing."""

        def around(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
            call = Call(module, copied(args), copied(kwargs))
            self.calls.append(call)
            out = forward(*args, **kwargs)
            call.out = copied(out)
            self.ended.append(call)
            return out

        return around


def copied(value: _T) -> _T:
    """`value` with every tensor in it cloned."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # type: ignore[return-value]  # a tensor stays a tensor
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(copied(element) for element in value)  # type: ignore[return-value]  # as above
    if isinstance(value, list):
        return [copied(element) for element in value]  # type: ignore[return-value]  # as above
    if isinstance(value, dict):
        return {key: copied(element) for key, element in value.items()}  # type: ignore[return-value]  # as above
    return value


def returned(out: Value, width: int) -> list[torch.Tensor]:
    """Selects the values of a module's output that may be parts of the stream; see `streams`."""
    return streams(out if isinstance(out, tuple) else (out,), {}, width)


def streams(args: Args, kwargs: Kwargs, width: int) -> list[torch.Tensor]:
    """The arguments that may be parts of the stream: floating tensors [..., width], in order."""
    return [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.ndim >= 2
        and value.shape[-1] == width
    ]
