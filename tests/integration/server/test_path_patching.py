"""Path patching between branches: every pass equals the same hooks in Hugging Face's model."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

import rheostat
from rheostat_engine import Point, Site

from ..engine.reference import Change, Float, HfReference

pytestmark = pytest.mark.integration

LAYERS = 6
CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Willis Tower is in the city of"
LONGER = "My friend said that the Eiffel Tower is in the city of"
PAIR = rheostat.Pair(CLEAN, corrupt=CORRUPT, answer=" Paris", foil=" Chicago")
POINTS = {"attn_out": Point.ATTN_OUT, "mlp_out": Point.MLP_OUT}
NATS = 1e-3

Branch = tuple[str, int]
Rows = dict[int, Float]
"""[tokens, W] by site."""


def index(branch: Branch) -> int:
    return Site(POINTS[branch[0]], branch[1]).index


def put(branch: Branch, rows: Rows, at: Sequence[int]) -> Change:
    """A hook that puts rows at positions of a branch."""
    given = torch.from_numpy(rows[index(branch)][list(at)])
    return Change(index(branch), lambda _: given, at)


class Naive:
    """Path patching as its authors write it: every pass over the whole prompt, with hooks."""

    def __init__(self, reference: HfReference, base: Sequence[int], source: Sequence[int]) -> None:
        self._reference, self._tokens = reference, base
        self.base, self.source = reference.run(base), reference.run(source)
        self.every = range(len(base))

    def send(
        self, senders: Iterable[Branch], frozen: Iterable[Branch], at: Sequence[int], but: object
    ) -> tuple[Rows, Float]:
        """The rows and the logprobs, with all frozen branches but one at the base prompt's."""
        held = [put(one, self.base.streams, self.every) for one in frozen if one != but]
        sent = [put(one, self.source.streams, at) for one in senders]
        run = self._reference.run(self._tokens, [*held, *sent])
        return run.streams, run.logprobs[-1]

    def receive(self, receivers: dict[Branch, Rows], at: Sequence[int]) -> Float:
        hooks = [put(branch, rows, at) for branch, rows in receivers.items()]
        return self._reference.run(self._tokens, hooks).logprobs[-1]


def after(senders: Sequence[Branch], *points: str) -> list[Branch]:
    """The branches after the first sender."""
    first = min(map(index, senders))
    every = [(point, layer) for point in points for layer in range(LAYERS)]
    return [branch for branch in every if index(branch) > first]


CASES = {
    "direct": ([("attn_out", 1)], "logits", {}),
    "several senders": (
        [("mlp_out", 1), ("attn_out", 3), ("attn_out", 1)],
        "logits",
        {"where": rheostat.positions(1, 2, 3), "freeze": [("attn_out", 3), ("mlp_out", 3)]},
    ),
    "to an mlp": ([("attn_out", 1)], [("mlp_out", 3)], {}),
    "several receivers": (
        [("mlp_out", 0)],
        [("mlp_out", 2), ("attn_out", 2), ("attn_out", 1)],
        {"receiver_where": rheostat.window(3), "where": rheostat.positions(1, 2, 3)},
    ),
    "mlps are free": ([("attn_out", 0)], [("attn_out", 2)], {"freeze": "attn_out"}),
    "nothing is frozen": ([("mlp_out", 0)], [("mlp_out", 5)], {"freeze": ()}),
    "the other way": ([("mlp_out", 0)], [("attn_out", 2)], {"direction": "noise"}),
}


@pytest.mark.parametrize("name", CASES)
def test_paths_are_those_of_hooks_in_hugging_faces_model(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    senders, receivers, options = CASES[name]
    prompts = [CORRUPT, CLEAN] if options.get("direction") != "noise" else [CLEAN, CORRUPT]
    base, source = (engine.tokenize(prompt).token_ids for prompt in prompts)
    naive = Naive(reference, base, source)
    at = [1, 2, 3] if "where" in options else list(naive.every)
    to = list(naive.every)[3 if "receiver_where" in options else 0 :]
    freeze = options.get("freeze", ("attn_out", "mlp_out"))
    points = [freeze] if isinstance(freeze, str) else freeze
    single = any(isinstance(one, tuple) for one in points)
    frozen = points if single else after(senders, *points)
    if receivers == "logits":
        _, logprobs = naive.send(senders, frozen, at, None)
    else:
        rows = {one: naive.send(senders, frozen, at, one)[0] for one in receivers}
        logprobs = naive.receive(rows, to)
    right, wrong = (engine.tokenize(text).token_ids[-1] for text in (" Paris", " Chicago"))

    found = engine.path_patch(PAIR, senders, receivers, **options)
    assert found.grade == "logit_difference"
    expected = [
        run[right] - run[wrong]
        for run in (naive.base.logprobs[-1], naive.source.logprobs[-1], logprobs)
    ]
    np.testing.assert_allclose([found.base, found.source, found.patched], expected, atol=NATS)
    assert abs(found.effect) > 5 * NATS, found
    assert engine.runs() == []


def test_the_direct_paths_of_everything_are_the_whole_effect(engine: rheostat.Engine) -> None:
    """At the last token, which is the same in both prompts, the stream is the sum of branches."""
    every = [(point, layer) for point in POINTS for layer in range(LAYERS)]
    found = engine.path_patch(PAIR, every, where=rheostat.positions(-1))
    assert found.recovered == pytest.approx(1, abs=NATS)


def test_a_prompt_as_its_own_source_changes_nothing(engine: rheostat.Engine) -> None:
    pair = rheostat.Pair(CLEAN, corrupt=CLEAN, answer=" Paris")
    found = engine.path_patch(pair, ("attn_out", 1), ("mlp_out", 3))
    assert found.grade == "logprob"
    assert found.patched == pytest.approx(found.base, abs=1e-6)
    assert np.isnan(found.recovered) or abs(found.effect) < 1e-6


def test_prompts_of_other_lengths_are_aligned_or_refused(engine: rheostat.Engine) -> None:
    pair = rheostat.Pair(CLEAN, corrupt=LONGER, answer=" Paris")
    last = rheostat.positions(-1)
    found = engine.path_patch(pair, ("attn_out", 1), align="affixes", where=last)
    assert np.isfinite(found.patched)
    with pytest.raises(rheostat.Refused) as raised:
        engine.path_patch(pair, ("attn_out", 1), where=last)
    assert raised.value.reason == "REASON_RUN_INCOMPLETE"
    assert engine.runs() == []
