"""A worker without a model: the runtime on CPU tensors, a forward pass that only runs the sites."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine import Event
from rheostat_engine.channel import EventMerger
from rheostat_engine.core.bank import Bank
from rheostat_engine.core.capture import Fence
from rheostat_engine.core.delivery import Frame
from rheostat_engine.core.expand import Expander
from rheostat_engine.core.program import Program
from rheostat_engine.core.runtime import Batch, SiteRuntime
from rheostat_engine.events import RowsHead, encode_head
from rheostat_engine.sites.op import reference

from .strategies import DIGESTS, ROWS, SITES

WIDTH = 4
TOKENS = 64
VECTORS = {
    digest: np.random.default_rng(i).uniform(1, 2, (ROWS, WIDTH)).astype(np.float32)
    for i, digest in enumerate(DIGESTS)
}

Scheduled = tuple[str, int, int]
"""vLLM's id of a request, its first scheduled position, how many are scheduled."""


class Outlet:
    """Takes what the worker sends straight to the server's merger."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.numbers: set[int] = set()
        self.free_bytes = 1 << 30
        self._merger = EventMerger(1)

    def send(self, frame: Frame) -> None:
        assert not isinstance(frame.head, RowsHead)
        self.numbers.add(frame.head.number)
        self.events += self._merger.feed(encode_head(frame.head), b"")

    def send_rows(self, head: RowsHead, rows: torch.Tensor) -> Fence | None:
        self.events += self._merger.feed(encode_head(head), rows.numpy().tobytes())
        return None


def stream_at(request_id: str, position: int, site: int) -> npt.NDArray[np.float32]:
    """What enters a site for a token, different for every one."""
    seed = [*request_id.encode(), position, site]
    return np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)


class Worker:
    """Runs batches and keeps what came out."""

    def __init__(
        self,
        *,
        rows: int = 64,
        slots: int = 64,
        ring: int = 1000,
        sites: frozenset[int] = frozenset(range(SITES)),
    ) -> None:
        bank = Bank(
            sites=SITES,
            rows=rows + 1,
            slots=slots + 1,
            width=WIDTH,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.program = Program(
            sites=SITES, tokens=TOKENS, bank=bank.rows, ring=torch.zeros(ring + 1, WIDTH)
        )
        self.outlet = Outlet()
        self.runtime = SiteRuntime(
            program=self.program,
            bank=bank,
            expander=Expander(self.program, bank.row_of, TOKENS),
            outlet=self.outlet,  # type: ignore[arg-type]  # has the two methods that are used
            rank=0,
            sites=sites,
        )
        self.runtime.load_vectors(VECTORS)
        self.streams: dict[tuple[str, int, int], npt.NDArray[np.float32]] = {}
        """What left a site, by (vLLM's id, position, site), as it was computed last."""
        self.padding_touched = False

    def step(self, scheduled: Sequence[Scheduled], padding: int = 0) -> None:
        """One forward pass."""
        tokens = [(i, p) for i, start, count in scheduled for p in range(start, start + count)]
        self.runtime.begin(
            Batch(
                request_ids=[i for i, _, _ in scheduled],
                computed=np.array([start for _, start, _ in scheduled], np.int32),
                scheduled=np.array([count for _, _, count in scheduled], np.int32),
                padded_tokens=len(tokens) + padding,
            )
        )
        for site in range(SITES):
            h = torch.full((len(tokens) + padding, WIDTH), 7.0)
            for token, (request_id, position) in enumerate(tokens):
                h[token] = torch.from_numpy(stream_at(request_id, position, site))
            if self.program.active.mask[site]:
                reference(h, [], *self.program.buffers(site))
            for token, (request_id, position) in enumerate(tokens):
                self.streams[request_id, position, site] = h[token].numpy().copy()
            self.padding_touched |= bool((h[len(tokens) :] != 7.0).any())
        self.runtime.end()
        self.padding_touched |= bool(self.program.ring[0].any())
