"""Numbers that are read of rows, in plain torch; see `readout_kernels`.

A number is read of a row of a step, or of the mean of the rows that a sample has added to a sum.
"""

import torch

from rheostat_engine.plan.acts import Kind
from rheostat_engine.plan.gates import Activation, Normalise
from rheostat_engine.worker.state.buffers import SiteBuffers, TokenColumn


def number_of(
    x: torch.Tensor, units: torch.Tensor, settings: torch.Tensor, floats: torch.Tensor
) -> torch.Tensor:
    """The numbers [n] that steps read of rows x [n, W].

    Args:
        x: [n, W] float32: the rows.
        units: [n, W]: the unit vector of each row's step.
        settings: [n]: the settings of each row's step; see `Programs.ints`.
        floats: [n, FLOATS]: the floats of each row's step.
    """
    bias, theta, factor, _ = floats[:, 4:].unbind(1)
    normalise = settings & 15
    z: torch.Tensor = (x * units).sum(1) * factor
    if len(own := (normalise == Normalise.COSINE).nonzero().squeeze(1)):
        norm = x[own].square().sum(1).sqrt()
        z[own] = torch.where(norm > 0, z[own] / norm, 0.0)
    if len(own := (normalise == Normalise.PROJECTED_COSINE).nonzero().squeeze(1)):
        projected = (z[own, None] * units[own]).tanh()
        norm = (x[own].square().sum(1) * projected.square().sum(1)).sqrt()
        along = (x[own] * projected).sum(1)
        z[own] = torch.where(norm > 0, along / norm, 0.0)
    z = z + bias
    activation = settings >> 4 & 15
    z = torch.where(activation == Activation.RELU, z.clamp(min=0), z)
    z = torch.where((activation == Activation.JUMP_RELU) & ~(z > theta), 0.0, z)
    return torch.where(activation == Activation.TANH, z.tanh(), z)


def read_rows(
    x: torch.Tensor, tokens: torch.Tensor, steps: torch.Tensor, site: SiteBuffers
) -> None:
    """Reads numbers of rows x [n, W], and adds rows to sums. `steps`: each row's first reading."""
    gates = site.gates
    while len(own := steps.nonzero().squeeze(1)):
        x, tokens, steps = x[own], tokens[own], steps[own]
        kinds, numbers, following, _, settings, columns, _ = site.ints[steps].long().unbind(1)
        adds = kinds == Kind.SUM
        if len(own := adds.nonzero().squeeze(1)):
            names = gates.tokens[tokens[own], TokenColumn.ROW_SUM] + numbers[own]
            sums = gates.row_sum_names[names].long()
            rows = torch.cat([x[own].double(), torch.ones(len(own), 1, dtype=torch.float64)], 1)
            gates.row_sums.index_add_(0, sums, rows)
        if len(own := (~adds).nonzero().squeeze(1)):
            units, floats = site.directions[numbers[own]], site.floats[steps[own]]
            read = number_of(x[own], units, settings[own], floats)
            gates.readings[tokens[own], columns[own] - 1] = read
        steps = following


def read_means_before(site: SiteBuffers, tokens: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Reads the numbers of means that gates need, before the openness is computed.

    A number is read if its position is in this step, and not after the gated token.

    Args:
        site: the site's buffers.
        tokens: [n]: indices of tokens in the step. Their samples have gates.
        steps: [n]: steps of `Kind.READ_MEAN`.

    Returns:
        [n]: the next step of each.
    """
    of_token = site.gates.tokens
    firsts = of_token[tokens, TokenColumn.FIRST].long()
    rows = firsts + site.ints[steps, 3] - of_token[firsts, TokenColumn.POSITION]
    here = ((rows >= firsts) & (rows <= tokens)).nonzero().squeeze(1)
    _read_means(site, rows[here], steps[here])
    return site.ints[steps, 2].long()


def read_means(site: SiteBuffers, tokens: torch.Tensor, steps: torch.Tensor) -> None:
    """Reads numbers of means after a forward pass.

    Args:
        site: the buffers of any site.
        tokens: [n]: indices of the tokens at whose positions they are read.
        steps: [n]: the first step of each. Those that follow are of the same kind.
    """
    while len(own := steps.nonzero().squeeze(1)):
        tokens, steps = tokens[own], steps[own]
        _read_means(site, tokens, steps)
        steps = site.ints[steps, 2].long()


def _read_means(site: SiteBuffers, tokens: torch.Tensor, steps: torch.Tensor) -> None:
    """Reads a number for each token, unless it was read before or no row was added to its sum."""
    gates = site.gates
    _, numbers, _, _, settings, columns, index = site.ints[steps].long().unbind(1)
    names = gates.tokens[tokens, TokenColumn.ROW_SUM] + index
    sums = gates.row_sums[gates.row_sum_names[names].long()]
    means = (sums[:, :-1] / sums[:, -1:]).float()
    read = number_of(means, site.directions[numbers], settings, site.floats[steps])
    known = gates.readings[tokens, columns - 1]
    unread = (sums[:, -1] > 0) & known.isnan()
    gates.readings[tokens, columns - 1] = torch.where(unread, read, known)
