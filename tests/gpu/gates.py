"""Gates on a GPU: the kernels against their references, and gated requests in compiled models."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from cases import EVERYWHERE, VECTOR, rows_of, same
from offline import OfflineEngine, Outcome
from tests.unit.engine.gate_chunks import any_gate, chunk_differences, reading_differences
from tests.unit.engine.row_means import mean_differences
from verdicts import APART, ROUNDED, SUMS, Lines, Verdict, at_least, at_most, each, equal

from rheostat_engine import (
    Act,
    Activation,
    Capture,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    Normalise,
    Plan,
    Pool,
    Reading,
    Signals,
)

CHUNKS = ((40, 300), (20, 1500), (4, 8192))
"""How many gates are compared, and over how many tokens of one step."""

OPENINGS = 24
"""Tokens of a long step that open the gate; the fold opens it at all."""


def check_gate_kernels(device: str = "cuda") -> Lines:
    """Readings of rows and means in every way, and gates of every kind over long steps."""
    results: dict[str, Verdict] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for carried, gain in ((None, 1.0), (None, 0.22), (dtype, 1.0), (torch.float32, 1.0)):
            worst = reading_differences(2560, dtype, carried, gain, device)
            title = f"readings of {dtype} carried {carried} gain {gain}: worst difference"
            results[title] = at_most(worst, 10 * SUMS)
            worst = mean_differences(2560, dtype, carried, gain, device)
            title = f"readings of a mean of {dtype} carried {carried} gain {gain}: worst difference"
            results[title] = at_most(worst, 10 * SUMS)
    rng = np.random.default_rng(11)
    for gates, tokens in CHUNKS:
        found: dict[str, float] = {}
        for seed in range(gates):
            gate = any_gate(rng, tokens)
            differences = chunk_differences(gate, seed, tokens, device, programs=OPENINGS)
            found = {name: max(one, found.get(name, 0.0)) for name, one in differences.items()}
        for name, one in found.items():
            title = f"{gates} gates over {tokens} tokens: worst difference of {name}"
            results[title] = at_most(one, SUMS)
    return results


def reading_at(site: int) -> Act:
    """Reads x.u of every token at a site, to column 0."""
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    return Act(Kind.READ, (VECTOR,), ((site, (1,)),), EVERYWHERE, reading=reading)


def gate_above(bound: float, **fields: Any) -> Gate:
    """Open where the last number that was read is above a bound."""
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, bound, math.inf)
    return Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)._replace(**fields)


def decided_by_prompt(bound: float, end: int, *, late: bool = False) -> Gate:
    """Decided by the mean over the prompt, at its last token, and then open."""
    condition = GateCondition((0,), Pool.MEAN, Combine.ANY, bound, math.inf, 1, end - 1)
    return gate_above(bound, conditions=(condition,), hold=Hold.REST, late=end if late else 0)


def check_gates(
    engine: OfflineEngine,
    plain: Sequence[Outcome],
    batch: list[list[int]],
    read: int,
    act: int,
    vector: Any,
    sampling: dict[str, Any],
) -> Lines:
    """Gated requests in one batch with others, against the same additions without gates.

    Args:
        engine: has loaded `VECTOR`.
        plain: what comes of the batch when it isn't steered.
        batch: prompts.
        read: the site that is read.
        act: a later site, where rows are added.
        vector: [2, W]; row 0 is added, row 1 is read.
        sampling: of every run.
    """
    results: dict[str, Verdict] = {}
    rows, everywhere = ((act, (0,)),), reading_at(read)

    def added(gate: Gate | None, scale: float = 1.0, spans: Any = EVERYWHERE) -> Plan:
        one = Act(Kind.ADD, (VECTOR,), rows, spans, scale)
        return Plan("", (one,) if gate is None else (replace(one, gate=gate), everywhere))

    def run(plan: Plan) -> list[Outcome]:
        plans = [plan if at % 4 == 0 else None for at in range(len(batch))]
        return engine.run(batch, plans, **sampling)

    steered, gated = range(0, len(batch), 4), {}
    half = gate_above(-1e9, form=Form.RAMP, a=0.0, b=2.0)
    end = len(batch[0])
    cases: dict[str, tuple[Gate, Plan | None]] = {
        "open": (gate_above(-1e9), added(None)),
        "shut": (gate_above(1e9), None),
        "half open": (half, added(None, 0.5)),
        "inverted": (gate_above(1e9, invert=True), added(None)),
        "held for the rest": (gate_above(-1e9, hold=Hold.REST), added(None)),
        "open at the next token": (
            gate_above(-1e9, hold=Hold.NEXT_TOKEN),
            added(None, spans=((1, EVERYWHERE[0][1]),)),
        ),
        "decided by the prompt": (
            decided_by_prompt(-1e9, end),
            added(None, spans=((end - 1, EVERYWHERE[0][1]),)),
        ),
        "late": (
            decided_by_prompt(-1e9, end, late=True),
            added(None, spans=((end, EVERYWHERE[0][1]),)),
        ),
        "decided to stay shut": (decided_by_prompt(1e9, end), None),
    }
    for name, (gate, alike) in cases.items():
        gated[name] = run(added(gate))
        expected = list(plain) if alike is None else run(alike)
        results[f"{name}: gated requests bit-identical to the same without a gate"] = each(
            [same(gated[name][at], expected[at]) for at in steered]
        )
        results[f"{name}: mates bit-identical to idle ones"] = each(
            [same(gated[name][at], plain[at]) for at in range(len(batch)) if at % 4]
        )
        if alike is not None:
            results[f"{name}: requests that changed"] = each(
                [not same(gated[name][at], plain[at]) for at in steered]
            )
    results |= check_decisions(engine, batch[0], read, added, vector, sampling)
    results |= check_signals(engine, plain, batch, read, vector, sampling)
    results |= check_shared(engine, batch[0], added)
    return results


def check_shared(engine: OfflineEngine, prompt: list[int], added: Any) -> Lines:
    """How many tokens of the next turn are cached after a request with a gate.

    Also that nothing is read that was computed under an open gate, which changes log-probabilities
    of the small model by a quarter of their range.
    """
    end, tokens = len(prompt), 60
    gates: dict[str, Plan | None] = {
        "plain": None,
        "shut": added(decided_by_prompt(1e9, end)),
        "shut, late": added(decided_by_prompt(1e9, end, late=True)),
        "open": added(decided_by_prompt(-1e9, end)),
        "of each token": added(gate_above(1e9)),
    }
    cached: dict[str, int] = {}
    difference = size = 0.0
    for name, plan in gates.items():
        engine.llm.reset_prefix_cache()
        (first,) = engine.run([prompt], [plan], max_tokens=tokens, skip_cache=False, logprobs=0)
        turn = [*prompt, *first.token_ids, *prompt[:9]]
        (warm,) = engine.run([turn], max_tokens=1, skip_cache=False)
        engine.llm.reset_prefix_cache()
        (cold,) = engine.run([turn], max_tokens=1)
        cached[name] = warm.cached
        difference = max(difference, float(np.abs(warm.logits() - cold.logits()).max()))
        size = max(size, float(np.ptp(cold.logits())))
    whole = cached["plain"]
    return {
        "next turn: cached tokens after a plain request": at_least(whole, end + 1),
        "next turn: after a gate that stays shut": equal(cached["shut"], whole),
        "next turn: after a late gate that stays shut": equal(cached["shut, late"], whole),
        "next turn: after a gate that opens, at most the prompt": at_most(cached["open"], end - 1),
        "next turn: after a gate of each token": equal(cached["of each token"], 0),
        "next turn: log-probabilities, worst difference to a cold cache, of their range": at_most(
            difference / size, APART
        ),
    }


def check_signals(
    engine: OfflineEngine,
    plain: Sequence[Outcome],
    batch: list[list[int]],
    read: int,
    vector: Any,
    sampling: dict[str, Any],
) -> Lines:
    """What leaves the worker of requests with signals, against their captured rows."""
    unit = vector[1].astype(np.float64) / np.linalg.norm(vector[1])
    watch = Capture((read,), EVERYWHERE)
    some = range(0, len(batch), 4)
    ends = [len(prompt) + len(plain[0].token_ids) - 1 for prompt in batch]
    (first,) = engine.run(batch[:1], [Plan("", (), (watch,))], **sampling)
    bound = float(np.median(rows_of(first, read, ends[0]) @ unit))
    gate = gate_above(bound)
    signals = Plan("", (reading_at(read),), (watch,), signals=Signals(1, (gate,), True))
    found = engine.run(
        batch, [signals if at in some else None for at in range(len(batch))], **sampling
    )
    worst, fired, wrong, missing = 0.0, 0, 0, 0
    for at in some:
        z = rows_of(found[at], read, ends[at]) @ unit
        missing += len(set(range(ends[at])) - found[at].signals.keys())
        missing += found[at].duplicates
        numbers = np.array([found[at].signals[p][0][0] for p in range(ends[at])])
        opened = np.array([found[at].signals[p][1][0] for p in range(ends[at])])
        worst = max(worst, float(np.abs(numbers - z).max() / np.abs(z).max()))
        wrong += int((opened != (numbers > np.float32(bound))).sum())
        fired += int(opened.sum())
    return {
        "signals: positions missing, or sent twice": at_most(missing, 0),
        "signals: readings, worst difference from captured rows": at_most(worst, ROUNDED),
        "signals: tokens at which a gate without acts is wrong": at_most(wrong, 0),
        "signals: tokens at which it is open": at_least(fired, 1),
        "signals: all requests bit-identical to idle ones": each(
            [same(one, other) for one, other in zip(found, plain, strict=True)]
        ),
    }


def check_decisions(
    engine: OfflineEngine,
    prompt: list[int],
    read: int,
    added: Any,
    vector: Any,
    sampling: dict[str, Any],
) -> Lines:
    """At which tokens gates open, by rows that are captured where they read; numpy decides alike.

    The steered tokens of each gate are counted by its doses.
    """
    unit = vector[1].astype(np.float64) / np.linalg.norm(vector[1])
    watch = Capture((read,), EVERYWHERE)
    (plain,) = engine.run([prompt], [Plan("", (), (watch,))], **sampling)
    end = len(prompt) + len(plain.token_ids) - 1
    ordered = np.sort(rows_of(plain, read, end) @ unit)
    middle = ordered[end // 3 : 2 * end // 3]
    at = int(np.argmax(np.diff(middle)))
    bound = float(middle[at : at + 2].mean())
    largest = GateCondition((0,), Pool.MAX, Combine.ANY, bound, math.inf)
    twice = GateCondition((0,), Pool.LAST, Combine.ANY, bound, math.inf, 2)
    gates = {
        "per token": (gate_above(bound), lambda z: z > bound),
        "largest so far": (
            gate_above(bound, conditions=(largest,)),
            lambda z: np.maximum.accumulate(z) > bound,
        ),
        "twice in a row": (
            gate_above(bound, conditions=(twice,)),
            lambda z: (z > bound) & np.append(False, z[:-1] > bound),
        ),
        "held for two tokens": (
            gate_above(bound, hold=Hold.TOKENS, tokens=2),
            lambda z: np.convolve(z > bound, [1, 1, 1])[: len(z)] > 0,
        ),
    }
    results: dict[str, Verdict] = {}
    for name, (gate, decide) in gates.items():
        (outcome,) = engine.run(
            [prompt], [replace(added(gate, 0.1), captures=(watch,))], **sampling
        )
        assert outcome.released is not None
        z = rows_of(outcome, read, end) @ unit
        steered = sum(dose.rows for dose in outcome.released.doses)  # none if it never opened
        wanted = int(decide(z).sum())
        # Captured rows are rounded, and the scheduler may compute a token more than is delivered.
        doubtful = int((np.abs(z - bound) < ROUNDED * np.abs(z).max()).sum())
        results[f"{name}: steered tokens, beyond numpy's"] = at_most(
            abs(steered - wanted), 1 + 3 * doubtful
        )
        # A small model may read no two tokens in a row above the bound.
        results[f"{name}: tokens that are to be steered"] = at_least(
            wanted, 0 if name == "twice in a row" else 2
        )
        # The first number may be the largest.
        results[f"{name}: tokens that are not"] = at_least(
            end - wanted, 0 if name == "largest so far" else 1
        )
    return results
