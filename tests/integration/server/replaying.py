"""Requests of many kinds at once, and each of them again alone: the rows must be the same.

Why replay: a row depends on its tokens and on the steering of every token up to it, never on the
schedule. So the tokens of a sample, given as a prompt to a quiet engine with the steering that each
position had, have the same rows, whatever happened while the sample was generated: updates,
preemption, chunked prefill, shared prefixes, observers that joined late, neighbours.

Rows are also replaced, and steering is gated by what probes read. In the replay the same gate reads
the same positions. Where a gate is either open or shut, a number next to its bound may fall on
either side of it. Such a sample is compared up to this position.
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
from rheostat._steering.gates import Hold, Pool

from .naive import BY_TOKEN, Row, row

POINTS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
LAYERS = 6
REQUESTS = 14
OBSERVERS = 3
TOLERANCE = 1e-4
"""Of a row's norm. Sums in another order differ by 1e-5 at most, a token that is steered in another
way by more than 1e-2."""
SMALLEST_NORM = 1e-3
"""Norm that a row of zeros counts as having."""

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

FEW: Sequence[tuple[rheostat.Selector | str, Holds]] = (
    (positions(0, -1), lambda p, token, n: p in (0, n - 1)),
    (window(20, 60), lambda p, token, n: 20 <= p < 60),
    (window(4, 24), lambda p, token, n: 4 <= p < 24),
)
"""Selectors of positions that every run has, few of them."""
SOURCE_TOKENS = 320
"""Positions of the run from which rows are taken: as many as the longest prompt has."""
MASKED = tuple(range(0, 128, 3))
"""Dimensions that a masked replacement replaces."""
HOLDS: Sequence[Hold] = ("token", "next_token", "rest", "until_read", 1, 7)
NEXT_TO_A_BOUND = 1e-5
"""A cosine this close to a bound may fall on either side of it."""


class Gated(NamedTuple):
    """A gate that reads the cosine of the stream with a vector, after one layer."""

    vector: Row
    layer: int
    where: rheostat.Selector | str
    holds: Holds
    """Which tokens it reads."""
    bound: float | None
    """It is open above this number. None: it is open as far as `form` says."""
    form: rheostat.Ramp | rheostat.Sigmoid | None
    pool: Pool
    hold: Hold

    def gate(self, where: rheostat.Selector | str) -> rheostat.Gate:
        """The gate, for the client."""
        probe = rheostat.probe(
            rheostat.inline(self.vector),
            points="resid_post",
            layers=self.layer,
            where=where,
            normalise="cosine",
        )
        if self.bound is not None:
            return rheostat.gate(probe.above(self.bound, pool=self.pool), hold=self.hold)
        return rheostat.gate(probe.summed(pool=self.pool), form=self.form, hold=self.hold)

    def undecided(self, all_rows: Rows, tokens: Sequence[int], length: int) -> int:
        """The first position that it reads too close to its bound; past the tokens, if none is."""
        if self.bound is None:
            return len(tokens)
        unit = self.vector[0] / np.linalg.norm(self.vector)
        for position, token in enumerate(tokens):
            if self.holds(position, token, length):
                values = all_rows["resid_post", self.layer, position]
                cosine = float(values @ unit / np.linalg.norm(values))
                if abs(cosine - self.bound) < NEXT_TO_A_BOUND:
                    return position
        return len(tokens)


class Placed(NamedTuple):
    """An intervention at places."""

    does: rheostat.Intervention
    """Without sites."""
    layers: Sequence[int]
    where: rheostat.Selector | str
    holds: Holds
    gated: Gated | None = None

    @property
    def ours(self) -> rheostat.Intervention:
        """For the client."""
        return self.at(self.where, None if self.gated is None else self.gated.where)

    def at(
        self, where: rheostat.Selector | str, reads: rheostat.Selector | str | None
    ) -> rheostat.Intervention:
        """The intervention at other tokens, whose gate reads other tokens."""
        placed = self.does.at(points="resid_post", layers=list(self.layers), where=where)
        if self.gated is None or reads is None:
            return placed
        return placed.when(self.gated.gate(reads))


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
    requests: int
    samples: int
    replaced: int
    """Samples of requests that replace rows."""
    gated: int
    """Samples of requests with a gate."""
    undecided: int
    """Rows that were not compared, because a gate read a number next to its bound."""
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
            for word in ("compared", "attached", "updates", "preemptions", "replaced", "gated")
            if not getattr(self, word)
        ]
        return found


class _Doubled:
    """Collects rows and counts duplicates."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, into: Rows, rows: Sequence[rheostat.Rows]) -> None:
        for one in rows:
            for position, values in zip(one.positions.tolist(), one.values, strict=True):
                key = (str(one.point), one.layer, position)
                self.count += key in into
                into[key] = values


def source_run(seed: int) -> str:
    """The id of the run from which the requests of a seed take rows."""
    return f"replay-{seed}-source"


def replacements(seed: int) -> list[rheostat.Intervention]:
    """Every kind of source, without sites."""
    run = source_run(seed)
    return [
        rheostat.replace(rheostat.inline(row(30))),
        rheostat.replace(rheostat.inline(row(31)), alpha=0.5),
        rheostat.replace(rheostat.inline(row(32)), dimensions=MASKED),
        rheostat.replace(rheostat.from_run(run)),
        rheostat.replace(rheostat.from_run(run), alpha=0.25),
        rheostat.replace(rheostat.run_mean(run)),
        rheostat.replace(rheostat.Noise(std=0.3, seed=seed)),
        rheostat.replace(rheostat.Zeros(), alpha=0.5),
    ]


def request_specs(seed: int, loras: Sequence[str]) -> tuple[list[RequestSpec], list[Watch]]:
    """Requests and observers; equal seeds give equal ones."""
    rng = random.Random(seed)
    ids = [[rng.randrange(3, 1900) for _ in range(200)] for _ in range(2)]

    def layers(least: int = 0) -> list[int]:
        some = range(least, LAYERS)
        return sorted(rng.sample(some, min(2, len(some))))

    def steering() -> list[Placed]:
        placed = [
            Placed(BY_TOKEN[rng.choice(list(BY_TOKEN))].does, layers(), where, holds)
            for where, holds in rng.sample(SELECTORS, rng.choice([0, 1, 1, 2]))
        ]
        if rng.random() < 0.3:
            placed.append(Placed(rng.choice(replacements(seed)), layers(), *rng.choice(FEW)))
        rng.shuffle(placed)
        return placed

    def gated() -> Placed:
        layer = rng.randrange(LAYERS - 1)
        bound = rng.choice([None, 0.0, 0.03])
        form = rng.choice([rheostat.Ramp(-0.1, 0.1), rheostat.Sigmoid(20.0, 0.0)])
        gate = Gated(
            row(20 + rng.randrange(8)),
            layer,
            *rng.choice(SELECTORS),
            bound,
            form if bound is None else None,
            rng.choice(["last", "max"] if bound is not None else ["last", "mean", "max"]),
            rng.choice(HOLDS),
        )
        where, holds = rng.choice(SELECTORS)
        return Placed(
            BY_TOKEN[rng.choice(list(BY_TOKEN))].does, layers(layer + 1), where, holds, gate
        )

    def first_steering() -> list[Placed]:
        return [*steering(), *(gated() for _ in range(rng.choice([0, 0, 1, 2])))]

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
            [first_steering(), *(steering() for _ in range(updates))],
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
        source = [3 + (seed + 7 * number) % 1900 for number in range(SOURCE_TOKENS)]
        into = rheostat.Capture("resid_post", to=rheostat.Run(source_run(seed)), where="prompt")
        await engines[0].generate(source, capture=into, max_tokens=1, temperature=0)
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
        await engines[0].delete_run(source_run(seed))
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
            reads = [
                p
                for p, token in enumerate(tokens)
                if one.gated is not None and one.gated.holds(p, token, length)
            ]
            if at and (reads or one.gated is None):  # a gate that reads nothing stays shut
                steering.append(one.at(_windows(at), _windows(reads) if reads else None))
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

    def compare(name: str, found: Rows, wanted: Rows, decided: int) -> None:
        """Compares rows up to the position `decided`; later ones must be there, too."""
        nonlocal largest
        missing, wrong = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        for key in found.keys() & wanted.keys():
            if key[2] >= decided:
                count["undecided"] += 1
                continue
            norm = max(float(np.linalg.norm(wanted[key])), SMALLEST_NORM)
            apart = float(np.linalg.norm(found[key] - wanted[key])) / norm
            largest = max(largest, apart)
            count["compared"] += 1
            if not apart <= TOLERANCE:  # NaN is wrong too
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
            steered = [placed for placed, _ in one.phases]
            gates = [placed.gated for placed in steered[0] if placed.gated is not None]
            decided = min(
                [gate.undecided(all_rows, tokens, length) for gate in gates], default=len(tokens)
            )
            count["gated"] += bool(gates)
            count["replaced"] += any(
                isinstance(placed.does, rheostat.Replace) for phase in steered for placed in phase
            )
            count["samples"] += 1
            at = [p for p, token in enumerate(tokens) if spec.holds(p, token, length)]
            keys = [(point, n, p) for point in spec.points for n in spec.layers for p in at]
            name = f"{spec.request_id}[{sample}], {length} prompt tokens"
            compare(name, one.rows[sample], {key: all_rows[key] for key in keys}, decided)
            for each in watched:
                if spec.request_id in each.missed or spec.request_id not in each.ended:
                    assert (spec.request_id, sample) not in each.rows
                    continue
                joined = any(other == spec.request_id for other, _ in each.firsts)
                # Of a request that had begun before, samples that had ended are left out.
                first = each.firsts.get((spec.request_id, sample), None if joined else 0)
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
                compare(f"{each.watch} of {name}", rows, wanted, decided)
    return Verdict(
        count["compared"],
        count["wrong"],
        count["missing"],
        doubled,
        count["attached"],
        sum(len(one.phases) - 1 for one in ran),
        sum(one.out.receipt.preemption_count for one in ran),
        len(requests),
        count["samples"],
        count["replaced"],
        count["gated"],
        count["undecided"],
        largest,
        examples,
    )
