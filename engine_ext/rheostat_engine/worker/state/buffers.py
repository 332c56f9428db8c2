"""The device buffers of the sites' ops: a step's instructions and the tables that they index.

Invariant: buffers never move or change shape, because captured graphs contain their addresses.

Each site and token has a `code`, the program to run (0: none, see `Programs`), and a `cap_row`, the
ring row to which the stream is copied (0: none). Each token has a `dose_slot`, to which its
measurements are added. Between steps these values are meaningless.
"""

from enum import IntEnum
from typing import NamedTuple

import torch

from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.plan.gate_table import State
from rheostat_engine.plan.gates import MAX_COLUMNS, MAX_GATES, MAX_TERMS
from rheostat_engine.worker.state.active_sites import ActiveSites

ALIGNED = 4
"""Integers in 16 bytes. A kernel is compiled for tensors that begin at a multiple of 16 bytes; for
others it would be compiled again, while requests wait. So the tokens of a site are rounded up to a
multiple, and the folds of a step begin at such a multiple."""


_NAMES = 16
"""Names for each sum of rows. First-fit allocation of ranges of up to 256 names (`MAX_COLUMNS`)
then never fails for fragmentation while sums are free: it needs at most 8 times what is in use
(Robson, 1977)."""


class FoldColumn(IntEnum):
    """Columns of the folds of a step. A fold is one gate of one sample; see `fold_step`."""

    STATE = 0
    GATE = 1
    NUMBER = 2
    """The number of the gate in the plan."""
    FIRST = 3
    """The first token of the sample in the step."""
    COUNT = 4
    """The number of the sample's tokens."""
    POSITION = 5
    """The position of the first token."""
    ONE_TERM = 6
    """Whether the gate has a single term."""


class GateBuffers(NamedTuple):
    """What gates are computed from, how far they are open, and the gains of tokens.

    Between the end of a step (`GateStates.end`) and the next step, the readings and the openness of
    its tokens are complete, if any of its samples has gates or signals.
    """

    readings: torch.Tensor
    """[tokens, MAX_COLUMNS] float32: numbers read in this step; NaN where none was read, in all
    columns that any sample of the step uses."""
    openness: torch.Tensor
    """[tokens, MAX_GATES] float32: how far each gate is open, by its number in the token's plan.
    The forward pass writes it at least for the tokens at which acts have the gate. The fold writes
    it for all tokens and all gates of a sample."""
    gains: torch.Tensor
    """[tokens, MAX_GAINS] float32: by the gain's index; for tokens whose programs have gains."""
    step: torch.Tensor
    """[columns of `FoldColumn` * states + 4 * tokens] int32: folds of the step, in front of
    `tokens`, so that one copy writes both."""
    tokens: torch.Tensor
    """[tokens, 4] int32, a view of `step`; see `TokenColumn`."""
    states: torch.Tensor
    """[states, rows of `State`, MAX_TERMS] float32: the state of each gate of each sample, after
    the earlier steps and the first `folded` tokens of this step. State 0 belongs to no gate."""
    folded: torch.Tensor
    """[states] int64: how many tokens of this step each state includes. Only the reference uses it.
    Kernels fold all tokens at the end of the step, so it stays 0."""
    ints: torch.Tensor
    """[gates, rows of `Ints`, MAX_TERMS] int32."""
    floats: torch.Tensor
    """[gates, rows of `Floats`, MAX_TERMS] float32."""
    row_sums: torch.Tensor
    """[sums, W + 1] float64: sums of rows of samples, and how many rows each has. Float64, so that
    the order in which rows are added does not show. Sum 0 belongs to no sample."""
    row_sum_names: torch.Tensor
    """[names] int32: the sums of each sample, one after the other. Name 0 belongs to no sample."""

    @classmethod
    def allocate(
        cls,
        tokens: int,
        states: int,
        ints: torch.Tensor,
        floats: torch.Tensor,
        *,
        row_sums: int = 0,
        width: int = 0,
    ) -> "GateBuffers":
        """Buffers for steps of up to `tokens` tokens.

        Args:
            tokens: the most tokens.
            states: states beside state 0.
            ints: see above.
            floats: see above.
            row_sums: sums of rows beside sum 0.
            width: W.
        """
        device = ints.device
        columns, folds = len(TokenColumn), len(FoldColumn) * states
        folds += -folds % ALIGNED
        step = torch.zeros(folds + columns * tokens, dtype=torch.int32, device=device)
        return cls(
            readings=torch.full((tokens, MAX_COLUMNS), torch.nan, device=device),
            openness=torch.zeros(tokens, MAX_GATES, device=device),
            gains=torch.ones(tokens, MAX_GAINS, device=device),
            step=step,
            tokens=step[folds:].view(tokens, columns),
            states=torch.zeros(states + 1, len(State), MAX_TERMS, device=device),
            folded=torch.zeros(states + 1, dtype=torch.int64, device=device),
            ints=ints,
            floats=floats,
            row_sums=torch.zeros(row_sums + 1, width + 1, dtype=torch.float64, device=device),
            row_sum_names=torch.zeros(_NAMES * row_sums + 1, dtype=torch.int32, device=device),
        )


class TokenColumn(IntEnum):
    """Columns of `GateBuffers.tokens`."""

    STATE = 0
    """The state of the sample's first gate; 0: it has neither gates nor sums of rows."""
    FIRST = 1
    """The first token of the sample in this step."""
    POSITION = 2
    """The token's position. After a step, the next token's, if the sample had one token and
    gates."""
    ROW_SUM = 3
    """The name of the sample's first sum of rows; 0: it has none."""


class SiteBuffers(NamedTuple):
    """The buffers of one site's op."""

    code: torch.Tensor
    """[tokens] int32."""
    cap_row: torch.Tensor
    """[tokens] int32."""
    dose_slot: torch.Tensor
    """[tokens] int32, the same for all sites."""
    rows: torch.Tensor
    """[rows, W]; for this and the next three see `Programs`."""
    directions: torch.Tensor
    """[directions, W] float32."""
    ints: torch.Tensor
    """[steps, INTS] int32."""
    floats: torch.Tensor
    """[steps, FLOATS] float32."""
    gates: GateBuffers
    """The same for all sites."""
    doses: torch.Tensor
    """[dose slots, 4] float32; see `Doses`."""
    ring: torch.Tensor
    """[ring rows, W]."""


class Buffers:
    """The current step's instructions by site and token, and the tables that they index."""

    def __init__(
        self,
        *,
        tokens: int,
        rows: torch.Tensor,
        directions: torch.Tensor,
        ints: torch.Tensor,
        floats: torch.Tensor,
        gates: GateBuffers,
        doses: torch.Tensor,
        ring: torch.Tensor,
    ) -> None:
        """Allocates the instructions.

        Args:
            tokens: the most tokens of a step, including padding.
            rows: this and the next three as in `SiteBuffers`.
            directions: see `rows`.
            ints: see `rows`.
            floats: see `rows`.
            gates: for as many tokens.
            doses: [sites, dose slots, 4] float32.
            ring: [ring rows, W].
        """
        sites, device = doses.shape[0], rows.device
        tokens = -(-tokens // ALIGNED) * ALIGNED
        self.code = torch.zeros(sites, tokens, dtype=torch.int32, device=device)
        self.cap_row = torch.zeros(sites, tokens, dtype=torch.int32, device=device)
        self.dose_slot = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.ring = ring
        self.gates = gates
        self.active = ActiveSites(sites)
        self.gains = [1.0] * sites
        """By site: the factor by which the model multiplies h before it adds h to the stream."""
        self.call_counts: list[int] | None = None
        """Runs of each site's op while the sites are verified; else None."""
        self._of_site = [
            SiteBuffers(
                self.code[site],
                self.cap_row[site],
                self.dose_slot,
                rows,
                directions,
                ints,
                floats,
                self.gates,
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
        """The number of sites."""
        return len(self._of_site)

    def site_handle(self, site: int) -> torch.Tensor:
        """The tensor that identifies a site in its op: the site's view of `code`."""
        return self._of_site[site].code

    def site_of(self, site_handle: torch.Tensor) -> int:
        """The site of a handle."""
        return self._site_of[site_handle.data_ptr()]

    def of(self, site: int) -> SiteBuffers:
        """The buffers of one site's op."""
        return self._of_site[site]
