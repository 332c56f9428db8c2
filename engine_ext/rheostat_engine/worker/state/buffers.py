"""The buffers that the sites' ops read and write: a step's instructions, and what they refer to.

Invariant: buffers never move or change shape, because captured graphs hold their addresses.

Each site and token has a `code`, the program to run (0: none, see `Programs`), and a `cap_row`, the
ring row to which the stream is copied (0: none). Each token has a `dose_slot`, to which its
measurements are added. Between steps these values are meaningless.
"""

from typing import NamedTuple

import torch

from rheostat_engine.worker.state.active_sites import ActiveSites

_ALIGNED = 4
"""Tokens of a site are rounded up to a multiple of it. The instructions of every site then begin
at 16 bytes, because kernels are compiled for the alignment of the first site."""


class SiteBuffers(NamedTuple):
    """The buffers of one site's op."""

    code: torch.Tensor
    """[tokens] int32."""
    cap_row: torch.Tensor
    """[tokens] int32."""
    dose_slot: torch.Tensor
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
    """[dose slots, 4] float32; see `Doses`."""
    ring: torch.Tensor
    """[ring rows, W]."""


class Buffers:
    """The instructions of the current step by site and token, and the tables that they refer to."""

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
        """Allocates the instructions.

        Args:
            tokens: the most tokens of a step, padding included.
            rows: [rows, W].
            directions: [directions, W] float32.
            ints: [steps, 4] int32.
            floats: [steps, 4] float32.
            doses: [sites, dose slots, 4] float32.
            ring: [ring rows, W].
        """
        sites, device = doses.shape[0], rows.device
        tokens = -(-tokens // _ALIGNED) * _ALIGNED
        self.code = torch.zeros(sites, tokens, dtype=torch.int32, device=device)
        self.cap_row = torch.zeros(sites, tokens, dtype=torch.int32, device=device)
        self.dose_slot = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.ring = ring
        self.active = ActiveSites(sites)
        self.gains = [1.0] * sites
        """By site: the factor by which the model multiplies h before it adds h to the stream."""
        self.call_counts: list[int] | None = None
        """How often each site's op has run, while the sites are verified; else None."""
        self._of_site = [
            SiteBuffers(
                self.code[site],
                self.cap_row[site],
                self.dose_slot,
                rows,
                directions,
                ints,
                floats,
                doses[site],
                ring,
            )
            for site in range(sites)
        ]
        self._site_of = {
            buffers.code.data_ptr(): site for site, buffers in enumerate(self._of_site)
        }

    @property
    def sites(self) -> int:
        """Number of sites."""
        return len(self._of_site)

    def site_handle(self, site: int) -> torch.Tensor:
        """The tensor by which an op identifies its site: the site's view of `code`."""
        return self._of_site[site].code

    def site_of(self, site_handle: torch.Tensor) -> int:
        """The site of a handle."""
        return self._site_of[site_handle.data_ptr()]

    def of(self, site: int) -> SiteBuffers:
        """The buffers of one site's op."""
        return self._of_site[site]
