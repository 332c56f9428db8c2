"""Batches as a scheduler may make them, and what the plans say should come of them."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np
from hypothesis import strategies as st

from rheostat_engine import Dose, Event, Installed, Kind, Plan, Released, Rows
from rheostat_engine.plan.row_encodings import RAW_KEY

from .cpu_worker import TOKENS, Worker, stream_at, token_at
from .formed import check_formed
from .naive import acting, change
from .strategies import SITES, captured, plans
from .tables import VECTORS

PlansById = Mapping[str, Plan | None]


class Schedule:
    """Draws batches: chunks, preemptions, padding, mates."""

    def __init__(self, data: st.DataObject, lengths: dict[str, int]) -> None:
        self._data = data
        self._lengths = lengths
        self._next = {i: data.draw(st.integers(0, 4), f"cached of {i}") for i in lengths}
        self.first = dict(self._next)
        self.furthest = dict.fromkeys(lengths, 0)
        self.preemptions: Counter[str] = Counter()
        self.computed: dict[str, list[int]] = defaultdict(list)
        """Positions, each as often as it was computed."""
        self._waiting = list(lengths)
        self._running: list[str] = []

    def run(self, worker: Worker, plans_by_id: PlansById) -> None:
        """All requests from their first token to their last."""
        while self._waiting or self._running:
            while self._waiting and (not self._running or self._data.draw(st.booleans(), "start")):
                request_id = self._waiting.pop(0)
                self._running.append(request_id)
                plan = plans_by_id[request_id]
                if plan is not None:
                    worker.add_request(request_id, plan)
            self._preempt(worker)
            batch, room = [], TOKENS - 8
            for request_id in self._data.draw(st.permutations(self._running), "batch"):
                start = self._next[request_id]
                left = self._lengths[request_id] - start
                count = min(room, left, self._data.draw(st.integers(1, 9), "chunk"))
                if count > 0:
                    batch.append((request_id, start, count))
                    room -= count
            worker.step(batch, self._data.draw(st.integers(0, 8), "padding"))
            self._advance(worker, batch)
            if self._running and self._data.draw(st.booleans(), "decode"):
                self._decode(worker)

    def _decode(self, worker: Worker) -> None:
        """In each of some steps, each running request computes one token."""
        padding = self._data.draw(st.integers(0, 8), "padding")
        left = min(self._lengths[i] - self._next[i] for i in self._running)
        for _ in range(self._data.draw(st.integers(1, left), "steps")):
            batch = [(i, self._next[i], 1) for i in self._running]
            worker.step(batch, padding)
            self._advance(worker, batch)

    def _advance(self, worker: Worker, batch: list[tuple[str, int, int]]) -> None:
        """Counts the tokens of a step, and ends the requests that are complete."""
        finished = []
        for request_id, start, count in batch:
            self._next[request_id] = start + count
            self.furthest[request_id] = max(self.furthest[request_id], start + count)
            self.computed[request_id] += range(start, start + count)
            if start + count == self._lengths[request_id]:
                finished.append(request_id)
                self._running.remove(request_id)
        worker.finish(*finished)

    def _preempt(self, worker: Worker) -> None:
        victim = self._data.draw(st.sampled_from([None, None, *self._running]), "preempt")
        if victim is not None and self.furthest[victim]:
            worker.runtime.preempt(victim)
            self.preemptions[victim] += 1
            low, high = self.first[victim], self.furthest[victim]
            self._next[victim] = self._data.draw(st.integers(low, high - 1), "restart")


def drawn_plans(data: st.DataObject) -> dict[str, Plan | None]:
    """Plans by vLLM's id; some requests have none."""
    count = data.draw(st.integers(1, 4), "requests")
    strategies = [st.one_of(st.none(), plans(f"plan {n}")) for n in range(count)]
    return {f"v{n}": data.draw(one, f"plan {n}") for n, one in enumerate(strategies)}


def check_stream(
    plan: Plan | None, request_id: str, position: int, site: int, found: np.ndarray
) -> None:
    """What left a site: bit for bit where rows are at most added, otherwise up to float32."""
    stream = stream_at(request_id, position, site)
    plan = plan or Plan("none")
    token = token_at(request_id, position)
    done = [act for _, act in acting(plan, site, position, token)]
    if all(act.kind is Kind.ADD for act in done):
        total = np.zeros_like(stream)
        for digest, row, scale in sorted(
            (act.vectors[0], dict(act.rows)[site][0], act.scale) for act in done
        ):
            total += np.float32(scale) * VECTORS[digest][row]
        assert found.tolist() == (stream + total).tolist()
    else:
        expected = change(plan, site, position, token, stream, VECTORS).row
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def expected_doses(plan: Plan, request_id: str, computed: list[int]) -> list[Dose]:
    """What a request's acts did at the positions that were computed."""
    totals: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for position in computed:
        token = token_at(request_id, position)
        for site in range(SITES):
            stream = stream_at(request_id, position, site)
            done = change(plan, site, position, token, stream, VECTORS).doses
            for index, (moved, share) in done.items():
                total = totals[index, site]
                total[0] += 1
                total[1] += moved
                total[2] += share
                total[3] = max(total[3], share)
    return [
        Dose(index, site, int(rows), *rest)
        for (index, site), (rows, *rest) in sorted(totals.items())
    ]


def check_doses(found: tuple[Dose, ...], expected: list[Dose]) -> None:
    """The same acts, sites and rows; sums up to float32."""
    assert [dose[:3] for dose in found] == [dose[:3] for dose in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[3:], other[3:], rtol=1e-3, atol=1e-4)


def check_events(worker: Worker, plan: Plan, request_id: str, schedule: Schedule) -> int:
    """One request's events; returns how many rows it lost."""
    events: list[Event] = [e for e in worker.row_sender.events if e.request_id == plan.request_id]
    installed, *between, released = events
    assert installed == Installed(plan.request_id, "")
    start, end = schedule.first[request_id], schedule.furthest[request_id]
    rows: dict[tuple[int, int], tuple[bytes, np.ndarray]] = {}
    for event in between:
        assert isinstance(event, Rows)
        for site, data in zip(event.sites, event.data, strict=True):
            for position, row in zip(event.positions.tolist(), data, strict=True):
                assert (site, position) not in rows
                rows[site, position] = event.encoding, row
    wanted = {
        (s, p): encoding for p in range(start, end) for s, encoding in captured(plan, p).items()
    }
    assert rows.keys() <= wanted.keys()
    for (site, position), (key, row) in rows.items():
        encoding = wanted[site, position]
        stream = row if encoding is None else worker.streams[request_id, position, site]
        check_stream(plan, request_id, position, site, stream)
        assert key == (RAW_KEY if encoding is None else encoding.key)
        if encoding is not None:
            check_formed(encoding, stream, row)
    assert isinstance(released, Released)
    computed = schedule.computed[request_id]
    check_doses(released.doses, expected_doses(plan, request_id, computed))
    assert released == Released(
        request_id=plan.request_id,
        doses=released.doses,
        measured=True,
        captured=dict(sorted(Counter(site for site, _ in rows).items())),
        lost_rows=len(wanted) - len(rows),
        preemptions=schedule.preemptions[request_id],
        computed=(start, end),
        recomputed=len(computed) - (end - start),
    )
    return len(wanted) - len(rows)
