"""Records and patches the `forward` of modules while a block runs.

Invariant: every patch is undone when its context ends, even after an exception.
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


class ForwardPatch(Protocol):
    """Runs in place of a module's forward."""

    def __call__(self, forward: Forward, args: Args, kwargs: Kwargs) -> Value:
        """Returns the module's output; `forward` is the original."""


@contextmanager
def patched_forwards(patches: dict[nn.Module, ForwardPatch]) -> Iterator[None]:
    """Replaces the `forward` of modules inside the `with` block."""
    own = {module: module.__dict__.get("forward") for module in patches}
    try:
        for module, function in patches.items():
            module.__dict__["forward"] = _wrap(module.forward, function)
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _wrap(forward: Forward, patch: ForwardPatch) -> Forward:
    def call(*args: Value, **kwargs: Value) -> Value:
        return patch(forward, args, kwargs)

    return call


@dataclass
class Call:
    """A recorded call of a module."""

    module: nn.Module
    args: Args
    """Copies of the arguments, with cloned tensors."""
    kwargs: Kwargs
    out: Value = None
    """Copy of the result."""


@dataclass
class Trace:
    """Recorded calls."""

    calls: list[Call] = field(default_factory=list)
    """In the order in which they began."""
    ended: list[Call] = field(default_factory=list)
    """In the order in which they ended."""

    def watch(self, module: nn.Module) -> ForwardPatch:
        """Records the module's calls and changes nothing."""

        def patch(forward: Forward, args: Args, kwargs: Kwargs) -> Value:
            call = Call(module, cloned(args), cloned(kwargs))
            self.calls.append(call)
            out = forward(*args, **kwargs)
            call.out = cloned(out)
            self.ended.append(call)
            return out

        return patch


def cloned(value: _T) -> _T:
    """A copy of `value` in which every tensor is cloned."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # type: ignore[return-value]  # a tensor stays a tensor
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(cloned(element) for element in value)  # type: ignore[return-value]  # as above
    if isinstance(value, list):
        return [cloned(element) for element in value]  # type: ignore[return-value]  # as above
    if isinstance(value, dict):
        return {key: cloned(element) for key, element in value.items()}  # type: ignore[return-value]  # as above
    return value


def output_tensors(out: Value, width: int) -> list[torch.Tensor]:
    """The values of a module's output that may be parts of the stream; see `stream_tensors`."""
    return stream_tensors(out if isinstance(out, tuple) else (out,), {}, width)


def stream_tensors(args: Args, kwargs: Kwargs, width: int) -> list[torch.Tensor]:
    """The arguments that may be parts of the stream: floating tensors [..., width], in order."""
    return [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.ndim >= 2
        and value.shape[-1] == width
    ]
