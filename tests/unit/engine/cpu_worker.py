"""A worker without a model: the runtime on CPU tensors, a forward pass that only runs the sites."""

import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine import Capacity, Event, Plan
from rheostat_engine.channel.events import (
    GainsHead,
    Head,
    RowsHead,
    SignalsHead,
    decode_head,
    encode_head,
)
from rheostat_engine.channel.worker_channel import EventMerger
from rheostat_engine.sites.reference import run_site
from rheostat_engine.worker.capture.captures import Captures
from rheostat_engine.worker.controllers import ControllerHost
from rheostat_engine.worker.expander import Expander
from rheostat_engine.worker.runtime import SiteRuntime
from rheostat_engine.worker.state.buffers import Buffers, GateBuffers
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.steering.bank import Bank
from rheostat_engine.worker.steering.doses import Doses
from rheostat_engine.worker.steering.gain_states import GainStates
from rheostat_engine.worker.steering.gate_states import GateStates
from rheostat_engine.worker.steering.steering import Steering
from rheostat_engine.worker.steering.token_rules import TokenRules
from rheostat_engine.worker.step_tokens import Batch
from rheostat_engine.worker.transport.event_sender import Fence, Frame
from rheostat_engine.worker.transport.row_encodings import RowEncodings
from rheostat_engine.worker.transport.row_sender import Group, PacedCopies, pack, packed_bytes
from rheostat_engine.worker.transport.staging_area import StagingArea

from .strategies import SITES, VOCABULARY
from .tables import CPU, VECTORS, WIDTH, capacity, norms, used

TOKENS = 64


def server_request_id(request_id: str) -> str:
    """The name of a request that brings no plan."""
    return f"name of {request_id}"


Scheduled = tuple[str, int, int]
"""vLLM's id of a request, its first scheduled position, how many are scheduled."""


class RowSender:
    """Takes what the worker sends straight to the server's merger."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.numbers: set[int] = set()
        self.free_bytes = 1 << 30
        self.fallback: Sequence[Head] = ()
        self.scratch = 2000
        self.kept_free = 0
        self.lost_rows = self.plain_rows = self.left_bytes = 0
        self.area = StagingArea(1 << 20, CPU)
        # Tests make thousands of workers, and a process may have few open files.
        weakref.finalize(self, self.area.close)
        self._merger = EventMerger(1)

    def send(self, frame: Frame) -> None:
        assert not callable(frame.head)
        for head in frame.head if isinstance(frame.head, Sequence) else [frame.head]:
            assert not isinstance(head, RowsHead | SignalsHead)
            if not isinstance(head, GainsHead):
                self.numbers.add(head.number)
            self.events += self._merger.feed(decode_head(encode_head(head)))

    def send_rows(self, head: RowsHead, rows: torch.Tensor, groups: Sequence[Group]) -> Fence:
        payload = torch.empty(packed_bytes(rows, groups), dtype=torch.uint8)
        pack(rows, groups, payload, scratch=self.scratch, copies=PacedCopies(None, 2))
        self.left_bytes += payload.nbytes
        self.events += self._merger.feed(decode_head(encode_head(head)), payload.numpy().data)
        return self

    def synchronize(self) -> None:
        """Rows leave at once."""

    def send_signals(self, head: SignalsHead, values: torch.Tensor) -> None:
        payload = values.numpy().tobytes()
        self.events += self._merger.feed(decode_head(encode_head(head)), payload)

    def send_measured(
        self,
        measured: torch.Tensor,
        heads: Callable[[torch.Tensor], Sequence[Head]],
        fallback: Sequence[Head],
    ) -> None:
        self.fallback = fallback
        for head in heads(measured):
            self.send(Frame(head))


def stream_at(request_id: str, position: int, site: int) -> npt.NDArray[np.float32]:
    """What enters a site for a token, different for every one."""
    seed = [*request_id.encode(), position, site]
    return np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)


def token_at(request_id: str, position: int) -> int:
    """The id of a request's token."""
    return (3 * position + sum(request_id.encode())) % VOCABULARY


class Worker:
    """Runs batches and keeps what came out."""

    def __init__(
        self,
        room: Capacity | None = None,
        *,
        sites: frozenset[int] = frozenset(range(SITES)),
        encode_bytes: int = 1 << 20,
        routers: bool = False,
        controllers: Mapping[str, ControllerHost] | None = None,
    ) -> None:
        room = room or capacity()
        site_slots = SiteSlots((SITES - 1) // 4, routers=routers)
        self.sites = site_slots.count
        sites |= set(range(SITES, site_slots.count))
        self.bank = Bank(
            sites=site_slots.count, capacity=room, width=WIDTH, dtype=torch.float32, device=CPU
        )
        self.rules = TokenRules(room.token_rules, room.ruled_intervals, VOCABULARY, CPU)
        self.doses = Doses(site_slots.count, CPU)
        programs = self.bank.programs
        self.buffers = Buffers(
            tokens=TOKENS,
            rows=programs.rows,
            directions=programs.directions,
            ints=programs.ints,
            floats=programs.floats,
            gates=GateBuffers.allocate(
                TOKENS,
                room.gate_states,
                programs.gate_ints,
                programs.gate_floats,
                row_sums=room.row_sums,
                width=WIDTH,
            ),
            doses=self.doses.dose_slots,
            ring=torch.zeros(room.capture_rows + 1, WIDTH),
        )
        self.row_sender = RowSender()
        gates, gains = GateStates(self.buffers.of(0)), GainStates(self.buffers.gates)
        self.steering = Steering(self.bank, self.rules, self.doses, gates, gains, site_slots)
        self.encodings = RowEncodings(
            width=WIDTH, itemsize=4, vectors=self.steering.vectors, limit=encode_bytes
        )
        self.captures = Captures(
            self.buffers.ring,
            self.row_sender,  # type: ignore[arg-type]  # has what is used
            self.encodings,
            site_slots=site_slots,
            present=sites,
            rank=0,
        )
        self.runtime = SiteRuntime(
            buffers=self.buffers,
            steering=self.steering,
            captures=self.captures,
            expander=Expander(self.buffers, self.bank.code_of, self.rules, TOKENS),
            row_sender=self.row_sender,  # type: ignore[arg-type]  # as above
            rank=0,
            site_slots=site_slots,
            sites=sites,
            server_request_id=server_request_id,
            controllers=controllers,
        )
        self.steering.load(VECTORS, norms(VECTORS))
        self.streams: dict[tuple[str, int, int], npt.NDArray[np.float32]] = {}
        """What left a site, by (vLLM's id, position, site), as it was computed last."""
        self.padding_touched = False

    def add_request(self, request_id: str, plan: Plan) -> None:
        """A request is scheduled for the first time."""
        self.runtime.add_request(request_id, plan.to_wire())
        self.runtime.send_installed()

    def finish(self, *request_ids: str) -> None:
        """Requests have finished."""
        for request_id in request_ids:
            self.runtime.remove_request(request_id)
        self.runtime.send_released()

    def step(self, scheduled: Sequence[Scheduled], padding: int = 0) -> None:
        """One forward pass."""
        tokens = [(i, p) for i, start, count in scheduled for p in range(start, start + count)]
        ids = [token_at(*token) for token in tokens] + [10**6] * padding
        self.runtime.begin(
            Batch(
                request_ids=[i for i, _, _ in scheduled],
                computed=np.array([start for _, start, _ in scheduled], np.int32),
                scheduled=np.array([count for _, _, count in scheduled], np.int32),
                padded_tokens=len(tokens) + padding,
                input_ids=torch.tensor(ids, dtype=torch.int32),
            )
        )
        for site in range(self.sites):
            h = torch.full((len(tokens) + padding, WIDTH), 7.0)
            for token, (request_id, position) in enumerate(tokens):
                h[token] = torch.from_numpy(stream_at(request_id, position, site))
            if self.buffers.active.mask[site]:
                run_site(h, None, self.buffers.of(site))
            for token, (request_id, position) in enumerate(tokens):
                self.streams[request_id, position, site] = h[token].numpy().copy()
            self.padding_touched |= bool((h[len(tokens) :] != 7.0).any())
        self.runtime.end()
        self.padding_touched |= bool(self.buffers.ring[0].any())

    def held(self) -> tuple[int, ...]:
        """Requests, rows, directions, steps, slots, gates, their states, sums, rules, cells, sites.

        What nobody uses any more counts for nothing, however long it stays.
        """
        self.steering.built_tables.collect(1 << 30)
        busy = int(self.doses.dose_slots.any(dim=(0, 2)).sum())
        active = int(self.buffers.active.mask.sum())
        states = self.steering.gates
        gates = self.bank.programs.gates_used, states.used, states.row_sums.used
        return (self.runtime.requests, *used(self.bank), *gates, len(self.rules), busy, active)


NOTHING = (0,) * 11
"""What an idle worker holds."""
