"""The buffers that the sites' ops read and write: what a step does, and what that refers to.

Invariant: buffers never move and never change shape after they are made; captured graphs hold their
addresses. For each site and token `code` says what happens (0: nothing, see `Programs`) and
`cap_row` which ring row the stream is copied to (0: none); `cell` says for each token where its
measurements go. Between steps all three are meaningless.
"""

from typing import NamedTuple

import torch

from rheostat_engine.core.active import ActiveSites

_ALIGNED = 4
"""A site has room for a multiple of so many tokens. Every site's instructions then begin on 16
bytes, as kernels expect that were compiled for the first site."""


class SiteBuffers(NamedTuple):
    """What one site's op works with."""

    code: torch.Tensor
    """[tokens] int32."""
    cap_row: torch.Tensor
    """[tokens] int32."""
    cell: torch.Tensor
    """[tokens] int32, the same for all sites."""
    rows: torch.Tensor
    """[rows, W]; this and the next three as in `Programs`."""
    directions: torch.Tensor
    """[directions, W] float32."""
    ints: torch.Tensor
    """[steps, 4] int32."""
    floats: torch.Tensor
    """[steps, 4] float32."""
    doses: torch.Tensor
    """[cells, 4] float32; see `Doses`."""
    ring: torch.Tensor
    """[ring rows, W]."""


class Buffers:
    """The per-token, per-site instructions of the step at hand, and what they refer to."""

    def __init__(
        self,
        *,
        tokens: int,
        rows: torch.Tensor,
        directions: torch.Tensor,
        ints: torch.Tensor,
        floats: torch.Tensor,
        doses: torch.Tensor,
        ring: torch.Tensor,
    ) -> None:
        """Allocates the instructions beside what they refer to.

        Args:
            tokens: the most tokens of a step, padding included.
            rows: [rows, W].
            directions: [directions, W] float32.
            ints: [steps, 4] int32.
            floats: [steps, 4] float32.
            doses: [sites, cells, 4] float32.
            ring: [ring rows, W].
        """
        sites, device = doses.shape[0], rows.device
        tokens = -(-tokens // _ALIGNED) * _ALIGNED
        self.code = torch.zeros(sites, tokens, dtype=torch.int32, device=device)
        self.cap_row = torch.zeros(sites, tokens, dtype=torch.int32, device=device)
        self.cell = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.ring = ring
        self.active = ActiveSites(sites)
        self.gains = [1.0] * sites
        """What the model multiplies a site's h by before it adds it to the stream."""
        self.census: list[int] | None = None
        """While the sites are being verified: how often each one's op has run."""
        self._of_site = [
            SiteBuffers(
                self.code[site],
                self.cap_row[site],
                self.cell,
                rows,
                directions,
                ints,
                floats,
                doses[site],
                ring,
            )
            for site in range(sites)
        ]
        self._site_of = {one.code.data_ptr(): site for site, one in enumerate(self._of_site)}

    @property
    def sites(self) -> int:
        """Number of sites."""
        return len(self._of_site)

    def mark(self, site: int) -> torch.Tensor:
        """The tensor by which a site's op knows its site: its view of `code`."""
        return self._of_site[site].code

    def site_of(self, mark: torch.Tensor) -> int:
        """Which site a mark belongs to."""
        return self._site_of[mark.data_ptr()]

    def of(self, site: int) -> SiteBuffers:
        """What one site's op works with."""
        return self._of_site[site]
