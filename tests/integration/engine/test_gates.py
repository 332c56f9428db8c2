"""Gates on the real engine equal hooks in Hugging Face's model that read and decide alike.

A gate of the hooks follows from the history of what was read by `openings`, which computes each
position from scratch in float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rheostat_engine import (
    NEVER,
    OPEN_END,
    Act,
    Activation,
    Band,
    Capture,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    Normalise,
    Plan,
    Point,
    Pool,
    Reading,
    Signals,
    Site,
    Spans,
)
from rheostat_engine.plan.points import site_count

from ...effort import at_length, some
from ...unit.engine.gated import apart, openings
from ...unit.engine.naive import projected_cosine
from .groups import BOTH, IN_TIGHT, PLAIN, TIGHT
from .models import LAYERS, build
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, capture, prompts, selected, vector
from .reference import Change, Float, HfReference

pytestmark = pytest.mark.integration

SITES = range(site_count(LAYERS))
READ = Site(Point.RESID_POST, 0).index, Site(Point.RESID_POST, 1).index
ACT = Site(Point.RESID_MID, 2).index
BESIDE = Site(Point.ATTN_OUT, 2).index
BEHIND = Site(Point.RESID_POST, 2).index
VECTORS = 6
PROBE, PUSH, OTHER = 4, 5, 3
"""Seeds of vectors that are read and written."""
TOKENS = 8
(PROMPT,) = prompts(1, 30, 31, seed=9)
END = len(PROMPT)
ROWS = 2e-4
"""Of rows, relative to the largest value of the stream: an openness may multiply what float32 has
rounded."""
MARGIN = 1e-4
"""Of what is read: nearer to a bound, the rounding to float32 might decide."""

Start = Callable[..., OfflineEngine]


def reading(
    normalise: Normalise = Normalise.UNIT,
    activation: Activation = Activation.IDENTITY,
    bias: float = 0.0,
    theta: float = 0.0,
    spans: Spans = EVERYWHERE,
    sites: Sequence[int] = READ[:1],
    mean_at: int = NEVER,
) -> Act:
    """Reads along one vector, to columns 0 and following."""
    rows = tuple((site, (0,)) for site in sites)
    read = Reading(normalise, activation, bias, theta, 0, mean_at)
    return Act(Kind.READ, (vector(PROBE)[0],), rows, spans, reading=read)


def condition(
    above: float,
    below: float = math.inf,
    *,
    columns: tuple[int, ...] = (0,),
    pool: Pool = Pool.LAST,
    combine: Combine = Combine.ANY,
    **fields: object,
) -> GateCondition:
    return GateCondition(columns, pool, combine, above, below, **fields)  # type: ignore[arg-type]  # fields


def gate(*conditions: GateCondition, hold: Hold = Hold.TOKEN, **fields: object) -> Gate:
    """A gate that opens where all conditions hold."""
    return Gate(conditions, Combine.ALL, Form.STEP, 0.5, 0.0, hold)._replace(**fields)


def summed(
    *, form: Form, a: float, b: float, columns: tuple[int, ...] = (0,), pool: Pool = Pool.LAST
) -> Gate:
    """A gate whose evidence is the number itself."""
    one = condition(-math.inf, columns=columns, pool=pool, combine=Combine.SUM)
    return gate(one, form=form, a=a, b=b)


class Case(NamedTuple):
    """Acts of a request, some of which have a gate."""

    acts: tuple[Act, ...]
    mixed: bool = True
    """Whether the gate is open at some tokens and shut at others."""
    sites: tuple[int, ...] = tuple(SITES)
    """The sites that the model has. All of them are captured."""

    @property
    def plan(self) -> Plan:
        """Captures every site too, and sends what is read and how far each gate is open."""
        columns = sum(len(act.rows) for act in self.acts if act.reading is not None)
        captures = (Capture(self.sites, EVERYWHERE),)
        return Plan("", self.acts, captures, signals=Signals(columns, (), True))

    @property
    def without_mid(self) -> "Case":
        """The case for parallel blocks, which have no RESID_MID: acts on ATTN_OUT instead."""
        acts = tuple(
            replace(act, rows=tuple((BESIDE if site == ACT else site, r) for site, r in act.rows))
            for act in self.acts
        )
        mids = {Site(Point.RESID_MID, layer).index for layer in range(LAYERS)}
        return Case(acts, self.mixed, tuple(site for site in SITES if site not in mids))


def push(opening: Gate, *sites: int) -> Act:
    rows = tuple((site, (0,)) for site in sites or (ACT,))
    return replace(add(PUSH, ACT, scale=2.0), rows=rows, gate=opening)


def gated_ops(opening: Gate) -> dict[str, Act]:
    """Every op other than an addition of one vector, under a gate."""
    one, two = (vector(seed)[0] for seed in (PUSH, OTHER))
    at, bands = ((ACT, (0,)),), (Band(-0.2, 0.3, 0.75),)
    acts = {
        "norm_add": Act(Kind.NORM_ADD, (one,), at, EVERYWHERE, 0.5),
        "ablate": Act(Kind.PULL, (one,), at, EVERYWHERE, bands=(Band(0.0, 0.0, 1.0),)),
        "clamp": Act(Kind.PULL, (one,), at, EVERYWHERE, bands=bands),
        "scale": Act(Kind.PULL, (one,), at, EVERYWHERE, bands=(Band(0.0, 0.0, -1.5),)),
        "replace": Act(Kind.REPLACE, (one,), at, EVERYWHERE, 1.0),
        "replace in part": Act(Kind.REPLACE, (one, two), ((ACT, (0, 0)),), EVERYWHERE, 0.5),
        "add last": Act(Kind.ADD_LAST, (one,), at, EVERYWHERE, 0.5),
    }
    return {name: replace(act, gate=opening) for name, act in acts.items()}


def cases(numbers: Float) -> dict[str, Case]:
    """Gates of every kind, with bounds between the numbers [n] that are read."""
    middle, once = bound(numbers), END - 1
    mean_bound = bound(np.cumsum(numbers) / np.arange(1, len(numbers) + 1))
    above = condition(middle)
    per_token, below = gate(above), gate(condition(-1e3, middle))
    ramp = summed(form=Form.RAMP, a=middle - 1, b=middle + 1)
    both = reading(sites=READ)
    decided = gate(condition(-1e3, pool=Pool.MEAN, decided_at=once), hold=Hold.REST)
    held = {
        "next token": gate(above, hold=Hold.NEXT_TOKEN),
        "three tokens": gate(above, hold=Hold.TOKENS, tokens=3),
        "rest": gate(condition(middle, for_tokens=2), hold=Hold.REST),
        "until read": gate(above, hold=Hold.UNTIL_READ),
        "in a row": gate(condition(middle, for_tokens=2)),
        "hysteresis": gate(condition(middle, stays_above=middle - 0.5)),
        "mean": gate(condition(mean_bound, pool=Pool.MEAN)),
        "largest": gate(condition(middle, pool=Pool.MAX)),
        "inverted": gate(above, invert=True),
    }
    gates = {name: Case((reading(), push(one))) for name, one in held.items()}
    some = reading(spans=((0, 4), (9, 12), (20, 33)))
    ops = {name: Case((reading(), act)) for name, act in gated_ops(per_token).items()}
    part = {f"half {name}": Case((reading(), act)) for name, act in gated_ops(ramp).items()}
    mean = summed(form=Form.SIGMOID, a=middle, b=2.0, pool=Pool.MEAN)
    return {
        **gates,
        "sigmoid of the mean": Case((reading(), push(mean)), mixed=False),
        **ops,
        **part,
        "read at some tokens": Case((some, push(gate(above, hold=Hold.UNTIL_READ)))),
        "of some tokens": Case((some, push(per_token))),
        "two layers": Case((both, push(gate(condition(middle, columns=(0, 1)))))),
        "sum of layers": Case((both, push(summed(form=Form.RAMP, a=-2.0, b=4.0, columns=(0, 1))))),
        "two gates": Case((reading(), push(per_token), push(below, BEHIND))),
        "at two sites": Case((reading(), push(per_token, ACT, BEHIND))),
        "once": Case((reading(), push(decided))),
        "once, of the last token": Case(
            (reading(spans=((once, END),)), push(gate(condition(-1e3, decided_at=once))))
        ),
        "late": Case((reading(sites=READ[1:]), push(decided._replace(late=END), READ[0] + 1))),
        "late, of each token": Case(
            (both, push(gate(above, hold=Hold.NEXT_TOKEN, late=END), READ[0], BEHIND))
        ),
        "never": Case((reading(), push(gate(condition(1e6)))), mixed=False),
        **readouts(),
        **means(),
    }


def readouts() -> dict[str, Case]:
    """Everything that can be read, as how far a gate is open."""
    found = {}
    for normalise in Normalise:
        size = 8.0 if normalise is Normalise.NONE else 1.0  # |v| is about 8
        for activation in Activation:
            read = reading(normalise, activation, 0.1 * size, 0.2 * size)
            opening = summed(form=Form.RAMP, a=-0.5 * size, b=3.0 * size)
            found[f"{normalise.name} {activation.name}"] = Case((read, push(opening)), mixed=False)
    return found


def means() -> dict[str, Case]:
    """Numbers that are read once, of the mean of rows of the prompt, to the last digits sent."""
    found = {}
    for normalise in Normalise:
        one = summed(form=Form.RAMP, a=-20.0, b=20.0)._replace(hold=Hold.REST)
        read = reading(normalise, spans=((0, END),), mean_at=END - 1)
        found[f"mean, {normalise.name}"] = Case((read, push(one)))
    projected, both = Normalise.PROJECTED_COSINE, {"sites": READ, "mean_at": END - 1}
    some = reading(projected, spans=((2, 9), (11, 25)), **both)
    two = gate(condition(-1e3, columns=(0, 1), combine=Combine.ALL), hold=Hold.REST)
    opened = gate(condition(-1e3, columns=(0, 1), decided_at=END - 1), hold=Hold.REST)
    return {
        **found,
        "mean of some tokens, at two layers": Case((some, push(two))),
        "mean, late": Case((some, push(opened._replace(late=END), READ[0], BEHIND))),
        "mean, shut": Case((some, push(gate(condition(1e3)))), mixed=False),
    }


def read_by_hand(act: Act, x: Float) -> Float:
    """What an act reads of rows x, [n, W], in float64."""
    assert act.reading is not None
    v = vector(PROBE)[1][0].astype(np.float64)
    z = x.astype(np.float64) @ v
    if act.reading.normalise is not Normalise.NONE:
        z = z / np.linalg.norm(v)
    if act.reading.normalise is Normalise.COSINE:
        z = z / np.linalg.norm(x.astype(np.float64), axis=1)
    if act.reading.normalise is Normalise.PROJECTED_COSINE:
        z = np.array([projected_cosine(row, v) for row in x.astype(np.float64)])
    z = z + act.reading.bias
    match act.reading.activation:
        case Activation.RELU:
            return np.maximum(z, 0)
        case Activation.JUMP_RELU:
            return np.where(z > act.reading.theta, z, 0)
        case Activation.TANH:
            return np.tanh(z)
    return z


def weighted(act: Act, x: torch.Tensor, opened: Float) -> torch.Tensor:
    """Rows x, [n, W], under an act whose strength is multiplied by numbers [n], in float64."""
    y, weight = x.double(), torch.from_numpy(opened).double()[:, None]
    values = {vector(seed)[0]: vector(seed)[1][0] for seed in (PUSH, OTHER)}
    row, *mask = (torch.from_numpy(values[digest]).double() for digest in act.vectors)
    unit = row / row.norm()
    match act.kind:
        case Kind.ADD | Kind.ADD_LAST:
            y = y + weight * act.scale * row
        case Kind.NORM_ADD:
            y = y + weight * act.scale * y.norm(dim=1, keepdim=True) * unit
        case Kind.REPLACE:
            y = y + weight * act.scale * (mask[0] if mask else 1.0) * (row - y)
        case _:
            (band,) = act.bands
            along = (y @ unit)[:, None]
            y = y + weight * band.strength * (along.clamp(band.low, band.high) - along) * unit
    return y.to(x.dtype)


def decide_apart(number: float, *bounds: float) -> None:
    assert apart(number, bounds, MARGIN), "the prompt leaves a decision to the rounding"


def check_case(reference: HfReference, name: str, case: Case, outcome: Outcome) -> Float:
    """Compares every row with Hugging Face's; returns how far the first gate is open, [n]."""
    tokens = [*PROMPT, *outcome.token_ids[:-1]]
    history: list[dict[int, float]] = [{} for _ in tokens]
    opened: dict[Gate, Float] = {}

    def open_gates(opening: Gate) -> Float:
        return np.array(openings(opening, history, 0, decide_apart))

    def note(act: Act, site: int) -> Callable[[torch.Tensor], torch.Tensor]:
        positions = selected(act, tokens)
        column = [one for one, _ in act.rows].index(site)

        def change(x: torch.Tensor) -> torch.Tensor:
            assert act.reading is not None
            if act.reading.of_mean:
                if act.reading.mean_at < len(history):
                    mean = x.double().numpy().mean(axis=0, keepdims=True)
                    (z,) = read_by_hand(act, mean)
                    history[act.reading.mean_at][column] = float(z)
                return x
            for position, z in zip(positions, read_by_hand(act, x.numpy()), strict=False):
                history[position][column] = float(z)
            return x

        return change

    def change(act: Act) -> Callable[[torch.Tensor], torch.Tensor]:
        def changed(x: torch.Tensor) -> torch.Tensor:
            assert act.gate is not None
            if not act.gate.late:
                opened[act.gate] = open_gates(act.gate)
            return weighted(act, x, opened[act.gate][: len(x)])

        return changed

    everything = list(range(len(tokens)))
    changes: list[Change] = []
    for act in sorted(case.acts, key=lambda act: act.reading is not None):  # reads come last
        for site, _ in act.rows:
            if act.reading is not None:
                changes.append(Change(site, note(act, site), selected(act, tokens)))
            else:
                changes.append(Change(site, change(act), everything))
    late = [act.gate for act in case.acts if act.gate is not None and act.gate.late]
    opened.update((one, np.zeros(len(tokens))) for one in late)
    for end in range(END, len(tokens)) if late else ():  # each token decides for those behind it
        reads = [one._replace(positions=[p for p in one.positions if p < end]) for one in changes]
        reference.run(tokens[:end], reads)
        opened.update((one, open_gates(one)) for one in late)
    expected = reference.run(tokens, changes)
    for site in case.sites:
        size = np.abs(expected.streams[site]).max()
        found = outcome.stream(site)
        assert np.abs(found - expected.streams[site]).max() / size < ROWS, (name, site)
    check_signals(case, outcome, history, list(opened.values()))
    first = next(act.gate for act in case.acts if act.gate is not None)
    if case.mixed and not name.startswith("half"):
        assert 0 < (opened[first] > 0).sum() < len(tokens), name
    return opened[first]


def check_signals(
    case: Case, outcome: Outcome, history: Sequence[dict[int, float]], opened: Sequence[Float]
) -> None:
    """The signals of each token have its readings, and how far each gate was open."""
    assert outcome.duplicates == 0
    assert sorted(outcome.signals) == list(range(len(history)))
    columns = case.plan.signals.readings
    read = [[one.get(column, math.nan) for column in range(columns)] for one in history]
    # A step has as many columns as the request of it that has most.
    found = [outcome.signals[position] for position in range(len(history))]
    sent_readings = [one[:columns] for one, _ in found]
    np.testing.assert_allclose(sent_readings, read, rtol=1e-3, atol=1e-3)
    for number, one in enumerate(opened):
        sent = [openness[number] for _, openness in found]
        np.testing.assert_allclose(sent, one, rtol=0, atol=2e-3)


def plain_numbers(engine: OfflineEngine) -> Float:
    """What `reading()` reads of the prompt, [n]."""
    (plain,) = engine.run([PROMPT], [capture(READ[0])], max_tokens=1)
    return read_by_hand(reading(), plain.stream(READ[0]))


def bound(numbers: Float) -> float:
    """A number in the middle of others, [n], far from each of them."""
    ordered = np.sort(numbers)
    central = ordered[len(ordered) // 3 : 2 * len(ordered) // 3]
    at = int(np.argmax(np.diff(central)))
    return float(central[at : at + 2].mean())


def check_cases(
    engine: OfflineEngine, reference: HfReference, tokens: int = TOKENS, *, has_mid: bool = True
) -> list[Outcome]:
    """Runs and checks all cases at once. `has_mid`: whether the model has the point RESID_MID."""
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    known = cases(plain_numbers(engine))
    if not has_mid:
        known = {name: case.without_mid for name, case in known.items()}
    plans = [case.plan for case in known.values()]
    outcomes = engine.run([PROMPT] * len(plans), plans, max_tokens=tokens, logprobs=0)
    for (name, case), outcome in zip(known.items(), outcomes, strict=True):
        check_case(reference, name, case, outcome)
    stats = engine.stats()
    used = {key: stats[key] for key in stats if key.endswith("_used")}
    assert used == dict.fromkeys(used, 0)
    return outcomes


@pytest.fixture(scope="module")
def reference(models_root: Path) -> HfReference:
    return HfReference("llama", build("llama", models_root))


@pytest.mark.parametrize("form", BOTH)
def test_gates_do_what_hooks_do_in_hugging_face(
    start: Start, reference: HfReference, form: str
) -> None:
    check_cases(start(enforce_eager=form == "eager"), reference)


@at_length
@pytest.mark.parametrize("chunk", some([4, 64], 4))
def test_prompts_in_pieces_change_no_decision(
    start: Start, reference: HfReference, chunk: int
) -> None:
    check_cases(start(max_num_seqs=4, max_num_batched_tokens=chunk), reference)


@IN_TIGHT
def test_gates_do_the_same_in_pieces_of_seven_tokens_and_after_preemption(
    start: Start, reference: HfReference
) -> None:
    outcomes = check_cases(start(**TIGHT), reference, 40)
    preempted = [one.released.preemptions for one in outcomes if one.released is not None]
    assert sum(preempted) > 0


@pytest.mark.parametrize("form", BOTH)
def test_shut_gates_and_mates_of_open_gates_change_no_bit(start: Start, form: str) -> None:
    engine = start(enforce_eager=form == "eager")
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    shut = gate(condition(1e6))
    late = gate(condition(1e6, decided_at=END - 1), hold=Hold.REST, late=END)
    ops = [*gated_ops(shut).values(), push(shut)]
    watched = capture(*SITES).captures
    mean = reading(Normalise.PROJECTED_COSINE, spans=((0, END),), mean_at=END - 1)
    plans = {
        "shut": Plan("", (reading(), *ops), watched),
        "shut by a mean": Plan("", (mean, *ops), watched),
        "shut late": Plan("", (reading(), push(late, READ[0])), watched),
        "open": Plan("", (reading(), push(gate(condition(-1e6)))), watched),
        "mate": capture(*SITES),
    }
    options = {"max_tokens": TOKENS, "logprobs": -1}
    plain = engine.run([PROMPT] * len(plans), [capture(*SITES)] * len(plans), **options)
    mixed = engine.run([PROMPT] * len(plans), list(plans.values()), **options)
    for name, one, other in zip(plans, plain, mixed, strict=True):
        same = one.logprobs == other.logprobs and all(
            np.array_equal(one.stream(site), other.stream(site)) for site in SITES
        )
        assert same == (name != "open"), name


WARM = 150
"""Tokens of a prompt, of which four blocks of 32 can be cached."""


def warm_plans() -> dict[str, Plan]:
    """Plans whose cached blocks differ in what they depend on."""
    last = WARM - 1
    watched = Capture(tuple(SITES), ((last, OPEN_END),))
    decided = condition(-1e3, decided_at=last)
    whole = gate(condition(-1e3, pool=Pool.MEAN, decided_at=last), hold=Hold.REST)
    read_last = reading(spans=((last, WARM),))
    mean = reading(Normalise.PROJECTED_COSINE, spans=((0, WARM),), mean_at=last)
    return {
        "plain": Plan("", (), (watched,)),
        "ungated": Plan("", (add(PUSH, ACT, scale=2.0),), (watched,)),
        "of the whole prompt": Plan("", (reading(), push(whole)), (watched,)),
        "of the last token": Plan("", (read_last, push(gate(decided, hold=Hold.REST))), (watched,)),
        "of each token": Plan("", (reading(), push(gate(condition(0.0)))), (watched,)),
        "of the mean": Plan("", (mean, push(gate(decided, hold=Hold.REST))), (watched,)),
    }


PLAIN_BLOCKS = {"plain", "of the whole prompt", "of the last token", "of the mean"}
"""Plans under which nothing happens before the last token."""
READ_EVERYTHING = {"of the whole prompt", "of each token", "of the mean"}
"""Plans whose gates need every token read."""
WARM_PLANS = [
    "plain",
    "ungated",
    "of the whole prompt",
    "of the last token",
    "of each token",
    "of the mean",
]


@PLAIN
@pytest.mark.parametrize("first", WARM_PLANS)
@pytest.mark.parametrize("second", WARM_PLANS)
def test_a_warm_cache_changes_no_decision(start: Start, first: str, second: str) -> None:
    engine = start()
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    (prompt,) = prompts(1, WARM, WARM + 1, seed=4)
    plans = warm_plans()
    options = {"max_tokens": TOKENS, "logprobs": 0}
    (cold,) = engine.run([prompt], [plans[second]], **options)
    assert engine.llm.reset_prefix_cache()
    engine.run([prompt], [plans[first]], skip_cache=False, **options)
    (warm,) = engine.run([prompt], [plans[second]], skip_cache=False, **options)
    alike = {first, second} <= PLAIN_BLOCKS or first == second == "ungated"
    assert warm.cached == (128 if alike and second not in READ_EVERYTHING else 0)
    assert warm.token_ids == cold.token_ids
    for site in SITES:
        np.testing.assert_allclose(warm.stream(site), cold.stream(site), rtol=1e-4, atol=1e-4)
