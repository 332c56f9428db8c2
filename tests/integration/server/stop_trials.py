"""Trials of rules that stop, on a real engine: no withheld token, row or signal reaches a client.

Without rules, a greedy request of each prompt says which tokens come and what the probe reads. A
trial runs one of the prompts again, with a rule that stops where the probe is above a bound. So the
row that fires is known before, and with it each token that may come. Bounds lie in gaps between the
readings, because sums differ in the last bits if the neighbours in a batch differ.
"""

import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import rheostat

from .test_gates import READ, probe

AT_ONCE = 24
"""Trials that run at the same time."""
_COUNT = 24
"""The most tokens of a trial."""
_GAP = 0.02
"""The least distance between two readings that a bound may separate."""
_SUBJECTS = (
    "The weather was grey and Anna felt",
    "My day was",
    "Tomorrow the old man",
    "In the garden a small dog",
    "The king and my sister",
)
_PROMPTS = [
    f"{one} {end}" for one in _SUBJECTS for end in ("so", "and then", "because", "at night")
]
_GREEDY = {"temperature": 0, "ignore_eos": True}


class Plain(NamedTuple):
    """A request without rules."""

    prompt: str
    length: int
    """Tokens of the prompt."""
    tokens: tuple[int, ...]
    text: str
    readings: np.ndarray
    """Of all rows, from the first of the prompt on: [P + _COUNT - 1]."""


class Trial(NamedTuple):
    """A request with a rule that stops."""

    number: int
    plain: Plain
    where: str
    bound: float
    drop_sampled: bool
    count: int
    hold_back: int
    owner: str
    """Who has the rule: "request", "request with signals" or "watch"."""
    captured: bool

    @property
    def fires(self) -> int | None:
        """The first row above the bound. The last token has no row."""
        first = 0 if self.where == "all" else self.plain.length
        read = self.plain.readings[first : self.plain.length + self.count - 1]
        above = np.flatnonzero(read > self.bound)
        return first + int(above[0]) if len(above) else None

    @property
    def kept(self) -> int:
        """How many tokens may come."""
        row, length = self.fires, self.plain.length
        if row is None:
            return self.count
        return 0 if row < length else row - length + 1 + (not self.drop_sampled)


class Found(NamedTuple):
    """What came of trials."""

    counts: Counter[str]
    """Of trials by owner, by `drop_sampled`, by where they fired, and by finish reason."""
    withheld: int
    """Tokens that no client got, although the engine makes them without the rule."""
    problems: list[str]


def play(engine: rheostat.Engine, seed: int, numbers: Iterable[int]) -> Found:
    """Makes the trials with these numbers, several at a time."""
    read = probe(name="read")
    plain = [_alone(engine, read, prompt) for prompt in _PROMPTS]
    trials = [_drawn(seed, number, plain) for number in numbers]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(partial(_run, engine), trials))
    counts = Counter(name for trial, (reason, _) in results for name in _names(trial, reason))
    withheld = sum(trial.count - trial.kept for trial in trials)
    return Found(counts, withheld, [problem for _, (_, found) in results for problem in found])


def _alone(engine: rheostat.Engine, read: rheostat.Probe, prompt: str) -> Plain:
    out = engine.generate(prompt, probes=read, max_tokens=_COUNT, **_GREEDY)
    length = len(out.prompt_token_ids)
    assert out.signals.positions.tolist() == list(range(length + _COUNT - 1))
    return Plain(prompt, length, out.token_ids, out.text, out.signals[read].ravel())


def _drawn(seed: int, number: int, plain: list[Plain]) -> Trial:
    """The trial with a number. It depends only on the seed, the number and the readings."""
    rng = random.Random(f"{seed} {number}")
    one = rng.choice(plain)
    where = "generated" if rng.random() < 0.8 else "all"
    read = one.readings[one.length if where == "generated" else 0 :]
    ordered = np.sort(read)
    gaps = np.flatnonzero(np.diff(ordered) > _GAP).tolist()
    at = rng.choice(gaps)
    bound = float(ordered[at : at + 2].mean())
    if rng.random() < 0.1:
        bound = float(ordered[-1] + 1)
    return Trial(
        number,
        one,
        where,
        bound,
        drop_sampled=rng.random() < 0.7,
        count=rng.choice([_COUNT, _COUNT, rng.randint(1, _COUNT)]),
        hold_back=rng.choice([0, 0, 1, 3]),
        owner=rng.choice(["request", "request", "request with signals", "watch"]),
        captured=rng.random() < 0.2,
    )


def _run(engine: rheostat.Engine, trial: Trial) -> tuple[Trial, tuple[str, list[str]]]:
    try:
        return trial, _ended(engine, trial)
    except rheostat.RheostatError as error:
        return trial, ("error", [f"{_about(trial)}: {error!r}"])


def _ended(engine: rheostat.Engine, trial: Trial) -> tuple[str, list[str]]:
    """The finish reason, and what was wrong."""
    fields = {} if trial.where == "all" else {"where": trial.where}
    read = probe(name="read", **fields)
    stop = rheostat.Stop("too high", trial.drop_sampled)
    rule = rheostat.Rule("high", read.above(trial.bound), stop)
    options: dict[str, Any] = {
        "max_tokens": trial.count,
        "hold_back": trial.hold_back,
        "capture": rheostat.Capture("resid_post", READ) if trial.captured else None,
        **_GREEDY,
    }
    if trial.owner == "watch":
        labels = {"trial": str(trial.number)}
        with engine.watch(rules=rule, labels=labels):
            came, out = _streamed(engine, trial.plain.prompt, labels=labels, **options)
    else:
        signals = read if trial.owner == "request with signals" else None
        came, out = _streamed(engine, trial.plain.prompt, rules=rule, probes=signals, **options)
    row, plain = trial.fires, trial.plain
    reason = "length" if row is None else "watch" if trial.owner == "watch" else "rule"
    last = plain.length + trial.count - 2 if row is None else row
    wanted = {
        "tokens that came": (came, list(plain.tokens[: trial.kept])),
        "tokens of the result": (list(out.token_ids), list(plain.tokens[: trial.kept])),
        "finish reason": (out.finish_reason, reason),
        "label": (out.samples[0].label, "" if row is None else "too high"),
        "text": (plain.text.startswith(out.text), True),
    }
    in_prompt = row is not None and row < plain.length
    if trial.captured and not in_prompt:  # rows of a prompt are computed in chunks
        wanted["captured rows"] = (len(out.activations["resid_post", READ]), last + 1)
    if trial.owner == "request with signals" and not in_prompt:
        first = 0 if trial.where == "all" else plain.length
        wanted["signals"] = (out.signals.positions.tolist(), list(range(first, last + 1)))
    return out.finish_reason, [
        f"{_about(trial)}: {name}: {got} instead of {expected}"
        for name, (got, expected) in wanted.items()
        if got != expected
    ]


def _streamed(engine: rheostat.Engine, prompt: str, **options: Any) -> tuple[list[int], Any]:
    """The tokens in the order in which they came, and the result."""
    with engine.stream(prompt, **options) as stream:
        came = [
            token
            for event in stream
            if isinstance(event, rheostat.Tokens)
            for token in event.token_ids
        ]
        return came, stream.result()


def _names(trial: Trial, reason: str) -> list[str]:
    row = trial.fires
    fired = "nowhere" if row is None else "a prompt" if row < trial.plain.length else "an answer"
    return [
        f"owner: {trial.owner}",
        f"drop_sampled: {trial.drop_sampled}",
        f"hold_back: {trial.hold_back}",
        f"captured: {trial.captured}",
        f"fires in: {fired}",
        f"finish: {reason}",
    ]


def _about(trial: Trial) -> str:
    return str({**trial._asdict(), "plain": trial.plain.prompt, "fires": trial.fires})
