"""The one op that stands in the compiled forward pass at every site.

    rheostat::site(Tensor(a!) h, Tensor? carried, Tensor site_handle) -> ()

The value at the site is s = gain * h + carried: the stream, or a branch that is about to be added
to it. The op lets the programs of the step's tokens change s, all of the change going into h, and
copies rows of the result to the capture ring. Acting on h, the branch that the next norm is about
to add, both the norm and the carried stream see the change. A router's logits are narrower than the
stream: no program ever changes them, and they fill the first columns of a ring row.

Invariant: the op is opaque to the compiler and reads only tensors that exist anyway, so that what
is compiled around it computes the same bits as without it; a site that isn't active launches
nothing. The op finds its other tensors through `site_handle`, one of `Buffers`' views, so that the
compiled code of equal blocks is equal. They are written although the schema does not say so, which
is safe because nothing in the graph reads them.
"""

import torch

from rheostat_engine.sites import recorder
from rheostat_engine.sites.reference import run_site
from rheostat_engine.worker.state.buffers import Buffers

_LIBRARY = torch.library.Library("rheostat", "DEF")
_LIBRARY.define("site(Tensor(a!) h, Tensor? carried, Tensor site_handle) -> ()")


class _Bound:
    buffers: Buffers | None = None


def bind(buffers: Buffers) -> None:
    """Makes `buffers` those that this process's sites follow."""
    _Bound.buffers = buffers


def site(
    h: torch.Tensor,  # [..., W]
    carried: torch.Tensor | None,  # [..., W]
    site_handle: torch.Tensor,  # [tokens] int32
) -> None:
    """Calls the op; see the module's docstring."""
    torch.ops.rheostat.site(h, carried, site_handle)


def _on_cpu(h: torch.Tensor, carried: torch.Tensor | None, site_handle: torch.Tensor) -> None:
    buffers = _Bound.buffers
    if buffers is None:
        return
    number = buffers.site_of(site_handle)
    if buffers.call_counts is not None:
        buffers.call_counts[number] += 1
    if buffers.active.mask[number]:
        run_site(h, carried, buffers.of(number), buffers.gains[number])


def _on_cuda(h: torch.Tensor, carried: torch.Tensor | None, site_handle: torch.Tensor) -> None:
    from rheostat_engine.sites.kernels import launch_site

    buffers = _Bound.buffers
    if buffers is None:
        return
    number = buffers.site_of(site_handle)
    if buffers.call_counts is not None:
        buffers.call_counts[number] += 1
    if torch.cuda.is_current_stream_capturing():
        launch_site(h, carried, buffers.of(number), buffers.gains[number])
        recorder.note(number)
    elif buffers.active.mask[number]:
        launch_site(h, carried, buffers.of(number), buffers.gains[number])


def _fake(h: torch.Tensor, carried: torch.Tensor | None, site_handle: torch.Tensor) -> None:
    return None


_LIBRARY.impl("site", _on_cpu, "CPU")
_LIBRARY.impl("site", _on_cuda, "CUDA")
torch.library.register_fake("rheostat::site", _fake, lib=_LIBRARY)
