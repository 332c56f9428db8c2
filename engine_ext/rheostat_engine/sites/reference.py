"""The site's op in plain torch: it runs on a CPU, and is the reference for the kernel.

For each token, the stream is x = gain * h + residual in float32, where `gain` is the model's
residual multiplier (not a client's gain). The steps of a program change x in order. `delta`, the
sum of their changes, is added to h as delta / gain in float32 and rounded once. Unchanged elements
keep their bits.

Replacements and noise (`Kind.acts_last`) come last. A changed element becomes 0 in h and its new
value in the residual, so that the model's sum of both is exactly this value. Without a residual, h
becomes the new value / gain. An element that already equals the row that replaces it, rounded to
the row's dtype, keeps its bits. So replacing a stream by its own captured rows changes nothing.

Why changed elements are limited
    A norm of infinities is NaN, and NaN stays in the KV cache after its request has ended:
    attention multiplies stale elements of a block by 0, and 0 times NaN is NaN.
Why x is limited, and not h alone
    The model adds h to `residual` in its own dtype, and then adds the next branch. If only h were
    limited, each steered site could raise the sum by the limit.
"""

from functools import cache
from typing import NamedTuple

import torch

from rheostat_engine.plan.acts import Kind, largest_replaced
from rheostat_engine.plan.gates import MAX_GATES
from rheostat_engine.worker.state.buffers import SiteBuffers
from rheostat_engine.worker.steering.gate_reference import open_gates
from rheostat_engine.worker.steering.programs import GAIN_UNIT, ROW_UNIT
from rheostat_engine.worker.steering.readout_reference import (
    number_of,
    read_means_before,
    read_rows,
)


class Limits(NamedTuple):
    """The largest magnitudes of a changed element."""

    stream: float
    """For x. An element of x that is already larger may shrink, but not grow."""
    own: float
    """For h: the largest number of its dtype."""


@cache
def limits(dtype: torch.dtype) -> Limits:
    """The limits for a model's dtype."""
    most = torch.finfo(dtype).max
    return Limits(largest_replaced(most), most)


def run_site(
    h: torch.Tensor, residual: torch.Tensor | None, site: SiteBuffers, gain: float = 1.0
) -> None:
    """Runs the programs of the step's tokens at a site, then copies captured rows to the ring.

    Args:
        h: [..., W], changed in place. Router logits are narrower, and never changed.
        residual: [..., W], changed in place by replacements. The stream is gain * h + residual.
            None: it is gain * h.
        site: the instructions and their tables.
        gain: the factor by which the model multiplies h.
    """
    width = h.shape[-1]
    h = h.view(-1, width)
    residual = None if residual is None else residual.view(-1, width)
    codes, cap_rows = site.code[: h.shape[0]], site.cap_row[: h.shape[0]]
    tokens = codes.nonzero().squeeze(1)
    if tokens.numel():
        _change(h, residual, tokens, codes.index_select(0, tokens).long(), site, gain)
    captured = cap_rows.nonzero().squeeze(1)
    if captured.numel():
        stream = _stream(h, residual, captured, gain).to(site.ring.dtype)
        site.ring[:, :width].index_copy_(0, cap_rows.index_select(0, captured).long(), stream)


def _stream(
    h: torch.Tensor, residual: torch.Tensor | None, tokens: torch.Tensor, gain: float
) -> torch.Tensor:
    stream = h.index_select(0, tokens).float()
    if gain != 1.0:
        stream *= gain
    return stream if residual is None else stream + residual.index_select(0, tokens).float()


def _change(
    h: torch.Tensor,
    residual: torch.Tensor | None,
    tokens: torch.Tensor,
    codes: torch.Tensor,
    site: SiteBuffers,
    gain: float,
) -> None:
    """Runs the programs of tokens: the first step of all of them, then the second, and so on."""
    dose_slots = site.dose_slot.index_select(0, tokens).long()
    steps = (-codes).clamp(min=0)
    added = (codes > 0).nonzero().squeeze(1)
    # Most programs that replace a row have no other step, so they skip `_add`.
    if len(added) or _groups(steps, site, last=False):
        _add(h, residual, tokens, codes, added, steps, dose_slots, site, gain)
    if len(own := steps.nonzero().squeeze(1)):
        if len(own) < len(steps):
            tokens, steps, dose_slots = tokens[own], steps[own], dose_slots[own]
        _replace(h, residual, tokens, steps, dose_slots, site, gain)
        if steps.any():
            read_rows(_stream(h, residual, tokens, gain), tokens, steps, site)


def _add(
    h: torch.Tensor,
    residual: torch.Tensor | None,
    tokens: torch.Tensor,
    codes: torch.Tensor,
    added: torch.Tensor,
    steps: torch.Tensor,
    dose_slots: torch.Tensor,
    site: SiteBuffers,
    gain: float,
) -> None:
    """Runs all steps of tokens except those that act last, and adds the sum of their changes to h.

    `added` are the indices of the tokens to which a row of the bank is added. `steps` [n] and
    `dose_slots` [n] advance to the first step that was not run.
    """
    x = _stream(h, residual, tokens, gain)
    named = codes.clamp(min=0)
    delta = site.rows.index_select(0, named % ROW_UNIT).float()  # row 0 is zeros
    if len(added):
        factor = _factor_of_codes(site, tokens[added], named[added])
        delta[added] *= factor
        _measure(site.doses, dose_slots[added], factor, None, x[added])
    before = delta.clone()
    while len(added) < len(codes) and (groups := _groups(steps, site, last=False)):
        for kind, own, ints in groups:
            if kind == Kind.READ_MEAN:
                steps[own] = read_means_before(site, tokens[own], steps[own])
                continue
            if kind == Kind.GATE:
                steps[own] = _open(steps[own], tokens[own], site)
                continue
            _, numbers, following, measured, settings, factors, writes = ints.unbind(1)
            floats = site.floats[steps[own]]
            steps[own] = following
            low, high, strength, written = floats[:, :4, None].unbind(1)
            factor = _factor(site, tokens[own], factors)
            strength = strength * factor
            y = x[own] + delta[own]
            if kind == Kind.ADD:
                delta[own] += factor * site.rows[numbers].float()
            elif kind == Kind.NORM_ADD:
                norm = y.square().sum(1, keepdim=True).sqrt()
                # A norm may be infinite, and a strength of 0 must change nothing even then.
                amount = torch.where(strength != 0, strength * norm, 0.0)
                delta[own] += amount * site.directions[numbers]
            else:
                along = number_of(y, site.directions[numbers], settings, floats)[:, None]
                amount = strength * (along.clamp(low, high) - along) * written
                unread = (settings >> 8 != 0)[:, None] & (along == 0)
                amount = torch.where((strength == 0) | unread, 0.0, amount)
                delta[own] += amount * site.directions[torch.where(writes > 0, writes, numbers)]
            ends = measured != 0
            if len(which := own[ends]):
                change = None if kind == Kind.ADD else delta[which] - before[which]
                at = x[which] + before[which]
                _measure(site.doses, dose_slots[which], factor[ends], change, at)
                before[which] = delta[which]
                dose_slots[which] += 1
    limit = limits(h.dtype)
    down, up = x.clamp(max=-limit.stream) - x, x.clamp(min=limit.stream) - x
    changed = h[tokens].float() + delta.clamp(down, up) * (1 / gain)
    changed = changed.clamp(-limit.own, limit.own).to(h.dtype)
    # Elements stay as they are if the change is NaN (from infinity times 0), or if the element was
    # not finite.
    changes = (delta != 0) & ~delta.isnan() & x.isfinite()
    h[tokens] = torch.where(changes, changed, h[tokens])


def _open(steps: torch.Tensor, tokens: torch.Tensor, site: SiteBuffers) -> torch.Tensor:
    """Opens the gates of steps [n] and of the gates that follow them, all in one call.

    Returns:
        [n]: the first step after these gates; 0: there is none.
    """
    opened, steps, own = [], steps.clone(), torch.arange(len(steps))
    while len(own):
        _, _, following, _, _, factors, _ = site.ints[steps[own]].long().unbind(1)
        opened.append((factors - 1, tokens[own]))
        steps[own] = following
        own = own[(following > 0) & (site.ints[following, 0] == Kind.GATE)]
    numbers, tokens = map(torch.cat, zip(*opened, strict=True))
    open_gates(site.gates, numbers, tokens)
    return steps


def _groups(
    steps: torch.Tensor, site: SiteBuffers, *, last: bool
) -> list[tuple[Kind, torch.Tensor, torch.Tensor]]:
    """Groups steps [n] by kind: the kind, the indices of its steps, and their rows of `ints`.

    Leaves out step 0 (none) and steps that read x. With `last`, only kinds that act last; without,
    only the others.
    """
    ints = site.ints.index_select(0, steps).long()
    kinds = torch.where(steps > 0, ints[:, 0], Kind.READ)
    listed = kinds.tolist()
    groups: list[tuple[Kind, torch.Tensor, torch.Tensor]] = []
    for kind in map(Kind, sorted(set(listed))):
        if not kind.reads and kind.acts_last == last:
            own = (kinds == kind).nonzero().squeeze(1)
            groups.append((kind, own, ints if len(own) == len(steps) else ints[own]))
    return groups


def _factor(site: SiteBuffers, tokens: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the factor on the strength of each step; `factors` as in `Programs.ints`."""
    if not factors.any():
        return torch.ones(len(tokens), 1)
    gates, gains = factors % GAIN_UNIT, factors // GAIN_UNIT
    openness = site.gates.openness[tokens, (gates - 1).clamp(min=0)]
    factor = torch.where(gates > 0, openness, 1.0)
    changed = site.gates.gains[tokens, (gains - 1).clamp(min=0)]
    return torch.where(gains > 0, factor * changed, factor)[:, None]


def _factor_of_codes(site: SiteBuffers, tokens: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the factors of the rows that codes name; see `addition_code`."""
    numbers = codes // ROW_UNIT
    gates = torch.where(numbers > MAX_GATES, 0, numbers)
    return _factor(site, tokens, gates + GAIN_UNIT * (numbers - MAX_GATES).clamp(min=0))


def _replace(
    h: torch.Tensor,
    residual: torch.Tensor | None,
    tokens: torch.Tensor,
    steps: torch.Tensor,
    dose_slots: torch.Tensor,
    site: SiteBuffers,
    gain: float,
) -> None:
    """Runs the steps of tokens that act last. `steps` [n] advance to the steps after them."""
    stream = _stream(h, residual, tokens, gain)
    value = stream.clone()
    while groups := _groups(steps, site, last=True):
        for kind, own, ints in groups:
            _, numbers, following, _, masks, factors, _ = ints.unbind(1)
            row, old = site.rows.index_select(0, numbers), value.index_select(0, own)
            added = kind == Kind.ADD_LAST
            wanted = old + row.float() if added else row.float()
            factor = _factor(site, tokens[own], factors)
            weight = site.floats.index_select(0, steps[own])[:, 2, None]
            if masks.any():
                weight = weight * torch.where(masks[:, None] > 0, site.rows[masks].float(), 1.0)
            weight = weight * factor
            new = wanted
            if not (weight == 1).all():
                change = row.float() if added else wanted - old
                new = torch.where(weight == 1, wanted, old + weight * change)
            changes = (weight != 0) & ~new.isnan()
            if not added:
                changes &= old.to(row.dtype) != row
            new = torch.where(changes, new, old)
            _measure(site.doses, dose_slots[own], factor, new - old, old)
            value.index_copy_(0, own, new)
            dose_slots[own] += 1
            steps[own] = following
    replaced = (value != stream) & ~value.isnan()
    limit, finite = limits(h.dtype), stream.nan_to_num(0.0, torch.inf, -torch.inf)
    value = value.clamp(finite.clamp(max=-limit.stream), finite.clamp(min=limit.stream))
    own_value = h.index_select(0, tokens)
    if residual is None:
        replacing = (value * (1 / gain)).clamp(-limit.own, limit.own)
        own_value = torch.where(replaced, replacing.to(h.dtype), own_value)
    else:
        rest = residual.index_select(0, tokens)
        rest = torch.where(replaced, value.to(residual.dtype), rest)
        residual.index_copy_(0, tokens, rest)
        own_value = own_value.masked_fill_(replaced, 0.0)
    h.index_copy_(0, tokens, own_value)


def _measure(
    doses: torch.Tensor,
    dose_slots: torch.Tensor,
    factor: torch.Tensor,
    change: torch.Tensor | None,
    x: torch.Tensor,
) -> None:
    """Adds the size of each token's change to its dose slot. Tokens with factor 0 don't count.

    For an addition `change` is None and the factor is summed, because the norm of its row is known;
    see `worker/steering/doses`.
    """
    norm = x.square().sum(1).sqrt()
    moved = factor[:, 0] if change is None else change.square().sum(1).sqrt()
    share = torch.where(norm > 0, moved / norm, 0.0)
    counts = (factor[:, 0] > 0).float()
    doses.index_add_(
        0, dose_slots, torch.stack([counts, moved, share, torch.zeros_like(norm)], dim=1)
    )
    doses[:, 3].scatter_reduce_(0, dose_slots, share, "amax")
