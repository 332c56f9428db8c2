"""The buffers that the compiled forward pass reads, one view per site.

Invariant: buffers never move and never change shape after they are made; captured graphs hold their
addresses. For each site and token `add_row` says which bank row is added (0: none) and `cap_row`
which ring row the stream is copied to (0: none); between steps both are meaningless.
"""

from typing import NamedTuple

import torch

from rheostat_engine.core.active import ActiveSites


class SiteBuffers(NamedTuple):
    """What one site's op is given."""

    add_row: torch.Tensor
    """[tokens] int32."""
    cap_row: torch.Tensor
    """[tokens] int32."""
    bank: torch.Tensor
    """[rows, W]."""
    ring: torch.Tensor
    """[ring rows, W]."""


class Program:
    """The per-token, per-site instructions of the step at hand."""

    def __init__(self, *, sites: int, tokens: int, bank: torch.Tensor, ring: torch.Tensor) -> None:
        """Allocates the instructions beside an existing bank and ring.

        Args:
            sites: number of sites.
            tokens: the most tokens of a step, padding included.
            bank: [rows, W].
            ring: [ring rows, W].
        """
        self.add_row = torch.zeros(sites, tokens, dtype=torch.int32, device=bank.device)
        self.cap_row = torch.zeros(sites, tokens, dtype=torch.int32, device=bank.device)
        self.bank = bank
        self.ring = ring
        self.active = ActiveSites(sites)
        self.census: list[int] | None = None
        """While the sites are being verified: how often each one's op has run."""
        self._site_of = {self.add_row[site].data_ptr(): site for site in range(sites)}

    def buffers(self, site: int) -> SiteBuffers:
        """The views that one site's op is given."""
        return SiteBuffers(self.add_row[site], self.cap_row[site], self.bank, self.ring)

    def site_of(self, add_row: torch.Tensor) -> int:
        """Which site a view of `add_row` belongs to."""
        return self._site_of[add_row.data_ptr()]
