"""The site's op in plain torch: it runs on a CPU, and is the reference for the kernel.

For each token, the stream is x = gain * h + residual in float32. A program's steps change x in
order. `delta`, the sum of their changes, is added to h as delta / gain in float32 and rounded once.
Unchanged elements keep their bits.

Replacements and last additions (`Kind.acts_last`) come last. A changed element becomes 0 in h and
its new value in the residual, so that the model's sum of both is exactly this value. Without a
residual, h becomes its new value / gain. An element that already equals the row that replaces it,
rounded to the row's dtype, keeps its bits: replacing a stream by its own captured rows changes
nothing.

Why changed elements are limited
    A norm of infinities is NaN, and NaN in the KV cache outlives its request: attention multiplies
    stale elements of a block by 0, which keeps NaN.
Why x is limited, and not h alone
    The model adds h to `residual` in its own dtype, and then adds the next branch. If only h were
    limited, each steered site could raise the sum by the limit.
"""

from typing import NamedTuple

import torch

from rheostat_engine.plan.acts import Kind, largest_replaced
from rheostat_engine.plan.gates import Activation, Normalise
from rheostat_engine.worker.state.buffers import SiteBuffers
from rheostat_engine.worker.steering.gate_reference import open_gate
from rheostat_engine.worker.steering.programs import GAIN_UNIT


class Limits(NamedTuple):
    """The largest magnitudes that a change can give to an element."""

    stream: float
    """For x. An element of x that is already larger may shrink, but not grow."""
    own: float
    """For h: the largest number of its dtype."""


def limits(dtype: torch.dtype) -> Limits:
    """The limits for a model's dtype."""
    most = torch.finfo(dtype).max
    return Limits(largest_replaced(most), most)


def run_site(
    h: torch.Tensor, residual: torch.Tensor | None, site: SiteBuffers, gain: float = 1.0
) -> None:
    """Executes a site's instructions.

    Args:
        h: [..., W], changed in place. Router logits are narrower, and never changed.
        residual: [..., W], added to h, changed in place by replacements; None if h is the whole
            value.
        site: the instructions and their tables.
        gain: the factor by which the model multiplies h.
    """
    width = h.shape[-1]
    h = h.view(-1, width)
    residual = None if residual is None else residual.view(-1, width)
    codes = site.code[: h.shape[0]]
    for code in codes.unique().tolist():
        if code:
            _change(h, residual, (codes == code).nonzero().squeeze(1), code, site, gain)
    captured = site.cap_row[: h.shape[0]].nonzero().squeeze(1)
    if captured.numel():
        stream = _stream(h, residual, captured, gain)
        site.ring[site.cap_row[captured].long(), :width] = stream.to(site.ring.dtype)


def _stream(
    h: torch.Tensor, residual: torch.Tensor | None, tokens: torch.Tensor, gain: float
) -> torch.Tensor:
    stream = h[tokens].float() * gain
    return stream if residual is None else stream + residual[tokens].float()


def _change(
    h: torch.Tensor,
    residual: torch.Tensor | None,
    tokens: torch.Tensor,
    code: int,
    site: SiteBuffers,
    gain: float,
) -> None:
    """Runs a program on the rows of its tokens."""
    x = _stream(h, residual, tokens, gain)
    delta = torch.zeros_like(x)
    dose_slots = site.dose_slot[tokens].long()
    every = torch.ones(len(tokens), 1)
    if code > 0:
        delta += site.rows[code].float()
        _measure(site.doses, dose_slots, every, None, x)
    step = -code
    before = delta.clone()
    while step > 0:
        kind, number, following, last, settings, factors, write = site.ints[step].tolist()
        if Kind(kind).acts_last or kind == Kind.READ:
            break
        if kind == Kind.GATE:
            open_gate(site.gates, number, factors - 1, tokens)
            step = following
            continue
        low, high, strength, written = site.floats[step, :4]
        factor = _factor(site, tokens, factors)
        strength = strength * factor
        y = x + delta
        if kind == Kind.ADD:
            delta = delta + factor * site.rows[number].float()
        elif kind == Kind.NORM_ADD:
            norm = y.square().sum(1, keepdim=True).sqrt()
            # A norm may be infinite, and a strength of 0 must change nothing even then.
            amount = torch.where(strength != 0, strength * norm, 0.0)
            delta = delta + amount * site.directions[number]
        else:
            along = _number(y, site.directions[number], settings, site.floats[step])[:, None]
            amount = strength * (along.clamp(low, high) - along) * written
            amount = torch.where(strength != 0, amount, 0.0)
            if settings >> 8:
                amount = torch.where(along == 0, 0.0, amount)
            delta = delta + amount * site.directions[write or number]
        if last:
            change = None if kind == Kind.ADD and not factors else delta - before
            _measure(site.doses, dose_slots, factor, change, x + before)
            before, dose_slots = delta, dose_slots + 1
        step = following
    limit = limits(h.dtype)
    down, up = x.clamp(max=-limit.stream) - x, x.clamp(min=limit.stream) - x
    changed = h[tokens].float() + delta.clamp(down, up) * (1 / gain)
    changed = changed.clamp(-limit.own, limit.own).to(h.dtype)
    # Elements stay as they are if the change is NaN (from infinity times 0), or if the element was
    # not finite.
    changes = (delta != 0) & ~delta.isnan() & x.isfinite()
    h[tokens] = torch.where(changes, changed, h[tokens])
    if step > 0:
        step = _replace(h, residual, tokens, step, dose_slots, site, gain)
    if step > 0:
        _read(_stream(h, residual, tokens, gain), tokens, step, site)


def _factor(site: SiteBuffers, tokens: torch.Tensor, factors: int) -> torch.Tensor:
    """[n, 1]: by what the strength of a step is multiplied; `factors` as in `Programs.ints`."""
    factor = torch.ones(len(tokens), 1)
    gain, gate = divmod(factors, GAIN_UNIT)
    if gate:
        factor = site.gates.openness[tokens, gate - 1, None]
    if gain:
        factor = factor * site.gates.gains[tokens, gain - 1, None]
    return factor


def _read(x: torch.Tensor, tokens: torch.Tensor, step: int, site: SiteBuffers) -> None:
    """Reads numbers of rows x; `step` is the first of the readings."""
    while step > 0:
        _, number, following, _, settings, column, _ = site.ints[step].tolist()
        read = _number(x, site.directions[number], settings, site.floats[step])
        site.gates.readings[tokens, column - 1] = read
        step = following


def _number(
    x: torch.Tensor, unit: torch.Tensor, settings: int, floats: torch.Tensor
) -> torch.Tensor:
    """What a step reads of rows x [n, W]: [n]. Settings and floats are those of its step."""
    bias, theta, factor, _ = floats[4:]
    z: torch.Tensor = (x * unit).sum(1) * factor
    if settings & 15 == Normalise.COSINE:
        norm = x.square().sum(1).sqrt()
        z = torch.where(norm > 0, z / norm, 0.0)
    z = z + bias
    match settings >> 4 & 15:
        case Activation.RELU:
            z = z.clamp(min=0)
        case Activation.JUMP_RELU:
            z = torch.where(z > theta, z, 0.0)
        case Activation.TANH:
            z = z.tanh()
    return z


def _replace(
    h: torch.Tensor,
    residual: torch.Tensor | None,
    tokens: torch.Tensor,
    step: int,
    dose_slots: torch.Tensor,
    site: SiteBuffers,
    gain: float,
) -> int:
    """Runs the steps that act last, the first of which is `step`; returns the next step, or 0."""
    stream = value = _stream(h, residual, tokens, gain)
    while step > 0:
        kind, number, following, _, mask, factors, _ = site.ints[step].tolist()
        if not Kind(kind).acts_last:
            break
        row = site.rows[number]
        added = kind == Kind.ADD_LAST
        wanted = value + row.float() if added else row.float()
        weight = site.floats[step, 2] * (site.rows[mask].float() if mask else torch.ones(len(row)))
        factor = _factor(site, tokens, factors)
        weight = weight * factor
        change = row.float() if added else wanted - value
        new = torch.where(weight == 1, wanted, value + weight * change)
        changes = (weight != 0) & ((value.to(row.dtype) != row) | added) & ~new.isnan()
        new = torch.where(changes, new, value)
        _measure(site.doses, dose_slots, factor, new - value, value)
        value, dose_slots, step = new, dose_slots + 1, following
    replaced = (value != stream) & ~value.isnan()
    limit, finite = limits(h.dtype), stream.nan_to_num(0.0, torch.inf, -torch.inf)
    value = value.clamp(finite.clamp(max=-limit.stream), finite.clamp(min=limit.stream))
    if residual is None:
        own = (value * (1 / gain)).clamp(-limit.own, limit.own)
    else:
        residual[tokens] = torch.where(replaced, value.to(residual.dtype), residual[tokens])
        own = torch.zeros_like(value)
    h[tokens] = torch.where(replaced, own.to(h.dtype), h[tokens])
    return step


def _measure(
    doses: torch.Tensor,
    dose_slots: torch.Tensor,
    factor: torch.Tensor,
    change: torch.Tensor | None,
    x: torch.Tensor,
) -> None:
    """Adds to each token's dose slot. A token whose factor is 0 is not counted.

    The change None is that of an addition that nothing multiplies: share 1 / |x|, and no |change|.
    """
    norm = x.square().sum(1).sqrt()
    moved = torch.zeros_like(norm) if change is None else change.square().sum(1).sqrt()
    share = (torch.ones_like(norm) if change is None else moved) / norm
    share = torch.where(norm > 0, share, 0.0)
    counts = (factor[:, 0] > 0).float()
    doses.index_add_(
        0, dose_slots, torch.stack([counts, moved, share, torch.zeros_like(norm)], dim=1)
    )
    doses[:, 3] = doses[:, 3].scatter_reduce(0, dose_slots, share, "amax")
