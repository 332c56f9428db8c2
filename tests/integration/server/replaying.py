"""Requests of many kinds at once, and each of them again alone: the rows must be the same.

Why replay: a row depends on its tokens and on the steering of every token up to it, never on the
schedule. So the tokens of a sample, given as a prompt to a quiet engine with the steering that each
position had, have the same rows, whatever happened while the sample was generated: updates,
preemption, chunked prefill, shared prefixes, observers that joined late, neighbours.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import numpy as np

import rheostat
from rheostat import generated, positions, token_ids, window

from .naive import BY_TOKEN, Placed

POINTS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
LAYERS = 6
REQUESTS = 14
OBSERVERS = 3
TOLERANCE = 1e-4
"""Of a row's norm. Sums in another order differ by 1e-5 at most, a token that is steered in another
way by more than 1e-2."""

Holds = Callable[[int, int, int], bool]
"""Whether a selector selects (position, token, P)."""
Key = tuple[str, int, int]
"""Point, layer, position."""
Rows = dict[Key, np.ndarray]

SELECTORS: Sequence[tuple[rheostat.Selector | str, Holds]] = (
    ("all", lambda p, token, n: True),
    ("prompt", lambda p, token, n: p < n),
    ("generated", lambda p, token, n: p >= n),
    (window(20), lambda p, token, n: 20 <= p < n),
    (window(20, 500), lambda p, token, n: p >= 20),
    (positions(0, -1), lambda p, token, n: p in (0, n - 1)),
    (generated(3, 30), lambda p, token, n: n + 3 <= p < n + 30),
    (token_ids(*range(100, 900)), lambda p, token, n: 100 <= token < 900),
    ("all" - token_ids(*range(300, 1100)), lambda p, token, n: not 300 <= token < 1100),
)


class RequestSpec(NamedTuple):
    """One request."""

    request_id: str
    prompt: list[int]
    delay: float
    """Seconds after the beginning."""
    samples: int
    tokens: int
    seed: int
    lora: str | None
    phases: list[list[Placed]]
    """Its steering at the start; each further list replaces it while the request runs."""
    updates_at: list[int]
    """After how many messages with tokens each update is sent."""
    points: list[str]
    layers: list[int]
    where: rheostat.Selector | str
    holds: Holds
    """What it captures itself."""


class Watch(NamedTuple):
    """A subscription to every request."""

    delay: float
    points: list[str]
    layers: list[int]


class Ran(NamedTuple):
    """The result of a request."""

    out: rheostat.Generation
    rows: dict[int, Rows]
    """Of its own capture, by sample."""
    phases: list[tuple[list[Placed], dict[int, int]]]
    """The steering that it had, each with the first position by sample."""


class Watched(NamedTuple):
    """The rows and events that a subscription received."""

    watch: Watch
    rows: dict[tuple[str, int], Rows]
    """By request and sample."""
    firsts: dict[tuple[str, int], int | None]
    """Samples that ran when it began, with the first position that it has of them."""
    ended: set[str]
    """Requests whose rows it received completely."""
    missed: set[str]


class Verdict(NamedTuple):
    """The comparison of the rows with the rows of the replay."""

    compared: int
    wrong: int
    missing: int
    doubled: int
    attached: int
    """Samples that an observer joined while they ran."""
    updates: int
    """Changes of steering that were carried out."""
    preemptions: int
    largest: float
    """Difference of a row, over its norm."""
    examples: list[str]
    """Of samples with wrong or missing rows: which, and where."""

    def problems(self) -> list[str]:
        """Errors of the round; empty: all rows are right, and the round tested what it should."""
        found = list(self.examples)
        if self.doubled:
            found.append(f"{self.doubled} rows came twice")
        found += [
            f"{word} is 0: the round shows less than it should"
            for word in ("compared", "attached", "updates", "preemptions")
            if not getattr(self, word)
        ]
        return found


class _Doubled:
    """Collects rows and counts duplicates."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, into: Rows, rows: Sequence[rheostat.Rows]) -> None:
        for one in rows:
            for position, row in zip(one.positions.tolist(), one.values, strict=True):
                key = (str(one.point), one.layer, position)
                self.count += key in into
                into[key] = row


def request_specs(seed: int, loras: Sequence[str]) -> tuple[list[RequestSpec], list[Watch]]:
    """Requests and observers; equal seeds give equal ones."""
    rng = random.Random(seed)
    ids = [[rng.randrange(3, 1900) for _ in range(200)] for _ in range(2)]

    def steering() -> list[Placed]:
        return [
            Placed(
                BY_TOKEN[rng.choice(list(BY_TOKEN))],
                sorted(rng.sample(range(LAYERS), 2)),
                where,
                holds,
            )
            for where, holds in rng.sample(SELECTORS, rng.choice([0, 1, 1, 2]))
        ]

    def request(number: int) -> RequestSpec:
        shared = rng.choice(ids)[: rng.choice([0, 130, 200])]
        own = [rng.randrange(3, 1900) for _ in range(rng.randrange(24, 120))]
        updates = rng.choice([0, 0, 1, 2, 4])
        where, holds = rng.choice(SELECTORS)
        return RequestSpec(
            f"replay-{seed}-{number}",
            shared + own,
            rng.random() * 2.0,
            rng.choice([1, 1, 2, 3]),
            rng.randrange(40, 160),
            rng.randrange(1 << 30),
            rng.choice([None, None, *loras]),
            [steering() for _ in range(updates + 1)],
            sorted(rng.sample(range(1, 60), updates)),
            rng.sample(POINTS, rng.choice([1, 2, 5])),
            sorted(rng.sample(range(LAYERS), rng.choice([1, 3, 6]))),
            where,
            holds,
        )

    watches = [
        Watch(
            0.0 if number == 0 else 0.5 + rng.random() * 3.0,
            rng.sample(POINTS, 2),
            sorted(rng.sample(range(LAYERS), 2)),
        )
        for number in range(OBSERVERS)
    ]
    return [request(number) for number in range(REQUESTS)], watches


async def _run(engine: rheostat.aio.Engine, spec: RequestSpec, doubled: _Doubled) -> Ran:
    await asyncio.sleep(spec.delay)
    session = engine.session(
        spec.prompt,
        steering=[placed.ours for placed in spec.phases[0]],
        capture=rheostat.Capture(spec.points, layers=spec.layers, where=spec.where),
        max_tokens=spec.tokens,
        n=spec.samples,
        seed=spec.seed,
        temperature=1.0,
        ignore_eos=True,
        lora=spec.lora,
        request_id=spec.request_id,
    )
    rows: dict[int, Rows] = {sample: {} for sample in range(spec.samples)}
    phases = [(spec.phases[0], dict.fromkeys(range(spec.samples), 0))]
    sent: dict[int, list[Placed]] = {}
    due, messages = list(spec.updates_at), 0
    async for event in session:
        if isinstance(event, rheostat.Tokens):
            messages += 1
            if due and messages >= due[0]:
                del due[0]
                phase = spec.phases[len(sent) + 1]
                sent[session.steer([placed.ours for placed in phase])] = phase
        elif isinstance(event, rheostat.Rows):
            doubled.take(rows[event.sample], [event])
        elif isinstance(event, rheostat.UpdateApplied):
            phases.append((sent[event.update_id], dict(event.first_positions)))
    return Ran(await session.result(), rows, phases)


async def _watch(
    engine: rheostat.aio.Engine, watch: Watch, until: set[str], doubled: _Doubled
) -> Watched:
    """Reads a subscription until one of `until` has ended there."""
    await asyncio.sleep(watch.delay)
    found = Watched(watch, {}, {}, set(), set())
    capture = rheostat.Capture(watch.points, layers=watch.layers)
    async with engine.subscribe(every=True, capture=capture) as subscription:
        found.missed.update(subscription.missed)
        async for event in subscription:
            if isinstance(event, rheostat.CapturedRows):
                mine = found.rows.setdefault((event.request_id, event.sample), {})
                doubled.take(mine, event.rows)
            elif isinstance(event, rheostat.EndOfRequest):
                found.ended.add(event.request_id)
                assert event.dropped_row_count == 0
                for one in event.attached:
                    found.firsts[one.request_id, one.sample] = one.first_position
                if event.request_id in until:
                    break
    return found


async def play(target: str, seed: int, loras: Sequence[str] = ()) -> Verdict:
    """All requests at once, then each sample alone; every row of both."""
    requests, watches = request_specs(seed, loras)
    doubled = _Doubled()
    last = f"replay-{seed}-last"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(rheostat.aio.connect(target)) for _ in range(4)]
        observers = [
            asyncio.create_task(_watch(engines[-1], watch, {last}, doubled)) for watch in watches
        ]
        runs = [
            asyncio.create_task(_run(engines[number % 3], spec, doubled))
            for number, spec in enumerate(requests)
        ]
        ran = await asyncio.gather(*runs)
        await asyncio.sleep(max(0.0, 4.0 - max(spec.delay for spec in requests)))
        # Ends after all others, so that observers know that nothing more comes.
        await engines[0].generate([5, 6, 7], max_tokens=2, temperature=0, request_id=last)
        watched = await asyncio.gather(*observers)
        replayed = {
            (spec.request_id, sample): await _replay(engines[0], spec, one, sample)
            for spec, one in zip(requests, ran, strict=True)
            for sample in range(spec.samples)
        }
    return _verdict(requests, ran, watched, replayed, doubled.count)


def _tokens(ran: Ran, sample: int) -> list[int]:
    """All tokens that were an input: the last generated one was none."""
    return [*ran.out.prompt_token_ids, *ran.out.samples[sample].token_ids][:-1]


async def _replay(engine: rheostat.aio.Engine, spec: RequestSpec, ran: Ran, sample: int) -> Rows:
    """Every row of a sample's tokens, steered at each position as the sample was."""
    tokens, length = _tokens(ran, sample), len(spec.prompt)
    steering: list[rheostat.Intervention] = []
    starts = [firsts.get(sample, len(tokens)) for _, firsts in ran.phases]
    for (placed, _), start, end in zip(ran.phases, starts, [*starts[1:], len(tokens)], strict=True):
        for one in placed:
            at = [p for p in range(start, end) if one.holds(p, tokens[p], length)]
            if at:
                where = _windows(at)
                act = one.op.does.at(points=one.points, layers=list(one.layers), where=where)
                steering.append(act)
    out = await engine.generate(
        tokens,
        steering=steering,
        capture=rheostat.Capture(POINTS),
        max_tokens=1,
        temperature=0,
        lora=spec.lora,
    )
    rows: Rows = {}
    for point in POINTS:
        for layer in range(LAYERS):
            values = out.activations[point, layer]
            assert len(values) == len(tokens)
            rows.update({(point, layer, p): row for p, row in enumerate(values)})
    return rows


def _windows(at: Sequence[int]) -> rheostat.Selector:
    """The union of these positions, ascending."""
    runs: list[list[int]] = []
    for position in at:
        if runs and runs[-1][1] == position:
            runs[-1][1] += 1
        else:
            runs.append([position, position + 1])
    selector = window(*runs[0])
    for run in runs[1:]:
        selector = selector | window(*run)
    return selector


def _verdict(
    requests: Sequence[RequestSpec],
    ran: Sequence[Ran],
    watched: Sequence[Watched],
    replayed: dict[tuple[str, int], Rows],
    doubled: int,
) -> Verdict:
    count: Counter[str] = Counter()
    largest = 0.0

    examples: list[str] = []

    def compare(name: str, found: Rows, wanted: Rows) -> None:
        nonlocal largest
        missing, wrong = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        for key in found.keys() & wanted.keys():
            apart = float(np.linalg.norm(found[key] - wanted[key]) / np.linalg.norm(wanted[key]))
            largest = max(largest, apart)
            count["compared"] += 1
            if apart > TOLERANCE:
                wrong.add(key)
        count["missing"] += len(missing)
        count["wrong"] += len(wrong)
        for word, keys in (("missing", missing), ("wrong", wrong)):
            if keys:
                layers = sorted({layer for _, layer, _ in keys})
                at = sorted({position for _, _, position in keys})
                where = f"layers {layers}, {len(at)} positions from {at[0]} to {at[-1]}"
                examples.append(f"{word} {len(keys)} of {name}: {where}")

    for spec, one in zip(requests, ran, strict=True):
        for sample in range(spec.samples):
            tokens, all_rows = _tokens(one, sample), replayed[spec.request_id, sample]
            length = len(spec.prompt)
            at = [p for p, token in enumerate(tokens) if spec.holds(p, token, length)]
            keys = [(point, n, p) for point in spec.points for n in spec.layers for p in at]
            name = f"{spec.request_id}[{sample}], {length} prompt tokens"
            compare(name, one.rows[sample], {key: all_rows[key] for key in keys})
            for each in watched:
                if spec.request_id in each.missed or spec.request_id not in each.ended:
                    assert (spec.request_id, sample) not in each.rows
                    continue
                first = each.firsts.get((spec.request_id, sample), 0)
                count["attached"] += (spec.request_id, sample) in each.firsts
                first = len(tokens) if first is None else first
                seen = [
                    (point, layer, p)
                    for point in each.watch.points
                    for layer in each.watch.layers
                    for p in range(first, len(tokens))
                ]
                rows = each.rows.get((spec.request_id, sample), {})
                wanted = {key: all_rows[key] for key in seen}
                compare(f"{each.watch} of {name}", rows, wanted)
    return Verdict(
        count["compared"],
        count["wrong"],
        count["missing"],
        doubled,
        count["attached"],
        sum(len(one.phases) - 1 for one in ran),
        sum(one.out.receipt.preemption_count for one in ran),
        largest,
        examples,
    )
