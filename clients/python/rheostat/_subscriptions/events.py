"""The events of a subscription."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat._capture.activations import IntArray, Rows
from rheostat._capture.encodings import Decoded, Encoding
from rheostat._points import Site
from rheostat._responses.results import DroppedRows, FinishReason
from rheostat._subscriptions.payloads import View
from rheostat_wire.dtypes import FloatArray


class Cursor(NamedTuple):
    """A place in a subscription, from which `Engine.resume` continues."""

    subscription_id: str
    sequence: int
    """Number of the last event before the place; 0 is the beginning."""


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """Rows of a request, at several sites and the same positions."""

    sequence: int
    """Number of the event, from 1 without gaps."""
    request_id: str
    capture: int
    """Index of the subscription's capture. Captures that requests send here follow."""
    sample: int
    """Sample, from 0."""
    baseline: bool
    """Whether the rows are of the baseline."""
    sites: tuple[Site, ...]
    """By layer, then point."""
    positions: IntArray
    """Absolute position of each row, int64 [positions], ascending."""
    token_ids: IntArray
    """Input token at each position, int64 [positions]."""
    shape: tuple[int, ...]
    """Of `values`: sites, positions, width."""
    _numbers: Decoded | View

    @property
    def _decoded(self) -> Decoded:
        return self._numbers.decoded if isinstance(self._numbers, View) else self._numbers

    @property
    def values(self) -> FloatArray:
        """The rows, float32 [sites, positions, width].

        For encoding "rp8" they are projected to ``kept`` numbers. With ``projection=`` they are x·d
        for each direction d. With ``views=True`` they are decoded at the first access, which raises
        Refused if the rows were acknowledged before.
        """
        return self._decoded.values

    @property
    def elements(self) -> npt.NDArray[np.generic] | None:
        """The elements as they were sent, of `shape`, not copied; None without ``views=True``.

        float32, float16, or uint16 with the bits of bfloat16. None for encodings other than "raw".
        Once this client, or a client that resumed the subscription, has acknowledged the rows, the
        content changes, and access raises Refused.
        """
        return self._numbers.elements if isinstance(self._numbers, View) else None

    @property
    def encoding(self) -> Encoding:
        """The encoding in which the rows were sent."""
        return self._decoded.encoding

    @property
    def max_error(self) -> FloatArray | None:
        """Largest error in each row, float32 [sites, positions]; None: exact.

        NaN for rows that were not finite.
        """
        return self._decoded.max_error

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The same rows, site by site."""
        return tuple(
            Rows(
                self.sample,
                *site,
                self.positions,
                self.token_ids,
                self.values[number],
                self.baseline,
                self.encoding,
                None if self.max_error is None else self.max_error[number],
            )
            for number, site in enumerate(self.sites)
        )

    def __repr__(self) -> str:
        of = f"{'baseline ' if self.baseline else ''}sample={self.sample}"
        sites = ", ".join(map(str, self.sites))
        return (
            f"CapturedRows({self.sequence}, {self.request_id!r}, {of}, {sites}, "
            f"shape={list(self.shape)})"
        )


@dataclass(frozen=True)
class Attached:
    """A sample that began before the subscription, and the first position of its rows."""

    request_id: str
    sample: int
    """Sample, from 0."""
    baseline: bool
    """Whether it is the sample's baseline."""
    first_position: int | None
    """First position whose rows are sent. None: not known yet or, in `EndOfRequest`, no rows."""


@dataclass(frozen=True)
class EndOfRequest:
    """The last event of a request: all rows that the server counts have arrived."""

    sequence: int
    """Number of the event."""
    request_id: str
    chunk_count: int
    """Number of its `CapturedRows` events."""
    row_count: int
    """Number of its rows, positions times sites."""
    dropped_row_count: int
    """Number of its rows that were lost."""
    finish_reasons: tuple[FinishReason, ...]
    """Why each sample ended; empty if the subscription ended before the request."""
    attached: tuple[Attached, ...] = ()
    """The first position of each sample; empty if the request began after the subscription."""
    missed_reason: str = ""
    """Why the request was not captured for the subscription; empty if it was."""


SubscriptionEvent: TypeAlias = CapturedRows | DroppedRows | EndOfRequest
"""The events of a subscription."""
