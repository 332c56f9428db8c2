"""The one op that stands in the compiled forward pass at every site.

    rheostat::site(Tensor(a!) h, Tensor[] carried, Tensor add_row, Tensor cap_row, Tensor bank,
                   Tensor ring) -> ()

The stream at the site is s = h + sum(carried). The op adds bank[add_row[t]] to h[t] and copies the
result's s[t] to ring[cap_row[t]]. Acting on h, the branch that the next norm is about to add, both
the norm and the carried stream see the addition.

Invariant: the op is opaque to the compiler and reads only tensors that exist anyway, so that what
is compiled around it computes the same bits as without it; a site that isn't active launches
nothing. `ring` is written behind the schema's back: nothing in the graph reads it.
"""

import torch

from rheostat_engine.core.program import Program
from rheostat_engine.sites import recorder

_LIBRARY = torch.library.Library("rheostat", "DEF")
_LIBRARY.define(
    "site(Tensor(a!) h, Tensor[] carried, Tensor add_row, Tensor cap_row, Tensor bank, "
    "Tensor ring) -> ()"
)


class _Bound:
    program: Program | None = None


def bind(program: Program) -> None:
    """Makes `program` the one that this process's sites follow."""
    _Bound.program = program


def site(
    h: torch.Tensor,  # [..., W]
    carried: list[torch.Tensor],  # each [..., W]
    add_row: torch.Tensor,  # [tokens] int32
    cap_row: torch.Tensor,  # [tokens] int32
    bank: torch.Tensor,  # [rows, W]
    ring: torch.Tensor,  # [ring rows, W]
) -> None:
    """Calls the op; see the module's docstring."""
    torch.ops.rheostat.site(h, carried, add_row, cap_row, bank, ring)


def reference(
    h: torch.Tensor,
    carried: list[torch.Tensor],
    add_row: torch.Tensor,
    cap_row: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """The op in plain torch; what every device's implementation must equal."""
    width = h.shape[-1]
    rows = h.view(-1, width)
    tokens = rows.shape[0]
    added = add_row[:tokens].nonzero().squeeze(1)
    if added.numel():
        addends = bank[add_row[added].long()].float()
        rows[added] = (rows[added].float() + addends).to(h.dtype)
    captured = cap_row[:tokens].nonzero().squeeze(1)
    if captured.numel():
        # The carried parts are summed among themselves first, as the norms do.
        stream = rows[captured].float()
        if carried:
            parts = [part.reshape(-1, width)[captured].float() for part in carried]
            stream = stream + sum(parts[1:], start=parts[0])
        ring[cap_row[captured].long()] = stream.to(ring.dtype)


def _on_cpu(
    h: torch.Tensor,
    carried: list[torch.Tensor],
    add_row: torch.Tensor,
    cap_row: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    program = _Bound.program
    if program is None:
        return
    number = program.site_of(add_row)
    if program.census is not None:
        program.census[number] += 1
    if program.active.mask[number]:
        reference(h, carried, add_row, cap_row, bank, ring)


def _on_cuda(
    h: torch.Tensor,
    carried: list[torch.Tensor],
    add_row: torch.Tensor,
    cap_row: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    from rheostat_engine.sites.kernels import launch_site

    program = _Bound.program
    if program is None:
        return
    number = program.site_of(add_row)
    if program.census is not None:
        program.census[number] += 1
    if torch.cuda.is_current_stream_capturing():
        launch_site(h, carried, add_row, cap_row, bank, ring)
        recorder.note(number)
    elif program.active.mask[number]:
        launch_site(h, carried, add_row, cap_row, bank, ring)


def _fake(
    h: torch.Tensor,
    carried: list[torch.Tensor],
    add_row: torch.Tensor,
    cap_row: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    return None


_LIBRARY.impl("site", _on_cpu, "CPU")
_LIBRARY.impl("site", _on_cuda, "CUDA")
torch.library.register_fake("rheostat::site", _fake, lib=_LIBRARY)
