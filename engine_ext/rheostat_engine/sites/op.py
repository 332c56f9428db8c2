"""The custom op that runs at every site of the compiled forward pass.

    rheostat::site(Tensor(a!) h, Tensor(b!)? residual, Tensor site_handle) -> ()

The value at a site is s = gain * h + residual: the stream, or a branch before it is added. `gain`
is the model's residual multiplier. The op runs the programs of the step's tokens on s, and copies
rows of the result to the capture ring. It writes changes to h, which the model's next norm adds to
the residual. Replacements are written to the residual, because the sum of both parts would round
them. Router logits are narrower than the stream: no program changes them, and they fill the first
columns of a ring row.

Invariants: the op is opaque to the compiler and reads only tensors that exist anyway, so the code
compiled around it computes the same bits as without it. Outside of CUDA graphs, an inactive site
launches no kernel.

Why steps call the op directly
    A step with more tokens than the largest CUDA graph runs without a graph, so the host calls the
    op at all sites: 145 for 36 layers. torch's dispatcher takes most of the time of such a call,
    although in most steps no site is active. `call_directly` replaces the C++ function behind the
    op by a Python function. In a step, this calls the implementation if a site is active, and else
    returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rheostat_engine.sites.reference import run_site
from rheostat_engine.worker.state.buffers import Buffers

_LIBRARY = torch.library.Library("rheostat", "DEF")
_LIBRARY.define("site(Tensor(a!) h, Tensor(b!)? residual, Tensor site_handle) -> ()")


class _Bound:
    buffers: Buffers | None = None
    note: Callable[[int], None] | None = None
    """Receives the site of each kernel that is captured."""


def bind(buffers: Buffers) -> None:
    """Sets the buffers that all sites of this process use."""
    _Bound.buffers = buffers


@contextmanager
def recording(note: Callable[[int], None]) -> Iterator[None]:
    """Within the `with` block, calls `note` with the site of each kernel that is captured.

    Args:
        note: called with the site of the last kernel captured on the current CUDA stream.
    """
    if _Bound.note is not None:
        raise RuntimeError("a CUDA graph is already being recorded")
    _Bound.note = note
    try:
        yield
    finally:
        _Bound.note = None


def note_captured(number: int) -> None:
    """Passes a site whose kernel was captured to the current recording, if there is one."""
    if _Bound.note is not None:
        _Bound.note(number)


def site(
    h: torch.Tensor,  # [..., W]
    residual: torch.Tensor | None,  # [..., W]
    site_handle: torch.Tensor,  # [tokens] int32
) -> None:
    """Calls the op; see the module's docstring."""
    torch.ops.rheostat.site(h, residual, site_handle)


def call_directly() -> None:
    """From now on, calls of the op in a step skip torch's dispatcher."""
    packet = torch.ops.rheostat.site
    for op in (packet, packet.default):
        if not isinstance(op._op, _Direct):
            op._op = _Direct(op._op)


class _Direct:
    """Replaces the function of an op: calls the implementation in a step, else the dispatcher."""

    def __init__(self, dispatch: Callable[..., None]) -> None:
        self._dispatch = dispatch

    def __call__(
        self, h: torch.Tensor, residual: torch.Tensor | None, site_handle: torch.Tensor
    ) -> None:
        buffers = _Bound.buffers
        # A compiler, which may run in a step too, passes tensors of its own types.
        plain = type(h) is torch.Tensor
        if buffers is None or not buffers.active.in_step or not plain:
            self._dispatch(h, residual, site_handle)
        elif buffers.active.key is not None:
            (_on_cuda if h.is_cuda else _on_cpu)(h, residual, site_handle)

    def __hash__(self) -> int:
        # torch has tables with ops as keys, and the hash of an op is the hash of this function.
        return hash(self._dispatch)


def _on_cpu(h: torch.Tensor, residual: torch.Tensor | None, site_handle: torch.Tensor) -> None:
    buffers = _Bound.buffers
    if buffers is None:
        return
    number = buffers.site_of(site_handle)
    if buffers.call_counts is not None:
        buffers.call_counts[number] += 1
    if buffers.active.mask[number]:
        run_site(h, residual, buffers.of(number), buffers.gains[number])


def _on_cuda(h: torch.Tensor, residual: torch.Tensor | None, site_handle: torch.Tensor) -> None:
    from rheostat_engine.sites.kernels import launch_site

    buffers = _Bound.buffers
    if buffers is None:
        return
    number = buffers.site_of(site_handle)
    if buffers.call_counts is not None:
        buffers.call_counts[number] += 1
    if torch.cuda.is_current_stream_capturing():
        launch_site(h, residual, buffers.of(number), buffers.gains[number])
        note_captured(number)
    elif buffers.active.mask[number]:
        launch_site(h, residual, buffers.of(number), buffers.gains[number])


def _fake(h: torch.Tensor, residual: torch.Tensor | None, site_handle: torch.Tensor) -> None:
    return None


_LIBRARY.impl("site", _on_cpu, "CPU")
_LIBRARY.impl("site", _on_cuda, "CUDA")
torch.library.register_fake("rheostat::site", _fake, lib=_LIBRARY)
