"""A controller holds a probe at a set point, exactly as the same loop in Hugging Face's model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rheostat_engine import Act, ControllerDisabled, Kind, Plan, Reading, Signals
from rheostat_engine.plan.gates import Activation, Normalise
from rheostat_engine.plan.plan import Control, PackedActs

from ..controller_plugins import HoldAtThree, install
from .forked import Context
from .groups import FORKED
from .models import build
from .offline import OfflineEngine, Outcome
from .plans import add, prompts, vector
from .reference import Add, Float, HfReference

pytestmark = pytest.mark.integration

Start = Callable[..., OfflineEngine]

READ_SITE, PUSH_SITE = 6, 3
READ_DIGEST, READ_VALUES = vector(7)
PUSH_DIGEST, PUSH_VALUES = vector(8)
SCALE = 0.5
TOKENS = 12


PLUGINS = ("holdatthree", "failssoon", "notanumber")
OPTIONS = {"controllers": PLUGINS}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plugins are installed, also for forked workers, which get the path of this process."""
    folder = tmp_path_factory.mktemp("controllers")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


READ = Act(
    Kind.READ,
    (READ_DIGEST,),
    ((READ_SITE, (0,)),),
    ((0, 1 << 20),),
    reading=Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0),
)


def controlled(name: str, prompt: list[int]) -> Plan:
    """A plan whose push at generated tokens a controller multiplies."""
    push = add(8, PUSH_SITE, ((len(prompt), 1 << 20),), SCALE)
    signals = Signals(1, (), False)
    gained = PackedActs((replace(push, gain=0), READ), signals)
    control = Control(name, gained, (0, 1), 1, len(prompt))
    return Plan("", (push, READ), signals=signals, private_from=len(prompt), control=control)


def by_hooks(reference: HfReference, prompt: list[int]) -> tuple[list[int], list[float], Float]:
    """Tokens, gains of the generated positions, and readings of the same loop."""
    tokens, gains, integral = list(prompt), [], 0.0
    for _ in range(TOKENS):
        adds = [
            Add(PUSH_SITE, SCALE * gain * PUSH_VALUES[0], [len(prompt) + number])
            for number, gain in enumerate(gains)
        ]
        run = reference.run(tokens, adds)
        read = run.streams[READ_SITE].astype(np.float64) @ READ_VALUES[0].astype(np.float64)
        error = HoldAtThree.set_point - float(read[-1])
        integral += error
        gains.append(HoldAtThree.law(error, integral))
        tokens.append(int(run.logprobs[-1].argmax()))
    return tokens[len(prompt) :], gains, read.astype(np.float32)


def load(engine: OfflineEngine) -> None:
    engine.load({READ_DIGEST: READ_VALUES, PUSH_DIGEST: PUSH_VALUES})


def check(outcome: Outcome, reference: HfReference, prompt: list[int]) -> None:
    tokens, gains, readings = by_hooks(reference, prompt)
    assert outcome.token_ids == tokens
    end = len(prompt) + TOKENS - 1
    found = np.array([outcome.signals[p][0][0] for p in range(end)])
    np.testing.assert_allclose(found, readings, rtol=0, atol=2e-3)
    assert outcome.released is not None
    last = {first: own[0] for first, own in outcome.released.gains}
    # A gain that came of position p acts at p + 1.
    expected = {len(prompt) + number: gain for number, gain in enumerate(gains[: TOKENS - 1])}
    assert last.keys() >= expected.keys()
    for position, gain in expected.items():
        assert last[position] == pytest.approx(gain, abs=2e-3)
    assert len(set(np.round(list(expected.values()), 3))) > TOKENS // 2


@pytest.mark.parametrize("chunk", [7, 256])
def test_the_loop_equals_hugging_faces(start: Start, models_root: Path, chunk: int) -> None:
    engine = start(max_num_batched_tokens=chunk, max_num_seqs=4, **OPTIONS)
    load(engine)
    reference = HfReference("llama", build("llama", models_root))
    batch = prompts(3, 20, 30, seed=3)
    plans = [controlled("holdatthree", prompt) for prompt in batch[:2]]
    mixed = engine.run(batch, [*plans, None], max_tokens=TOKENS)
    for prompt, outcome in zip(batch[:2], mixed, strict=False):
        check(outcome, reference, prompt)
    calls, *_, disabled = engine.stats()["controllers"]["holdatthree"]
    assert calls > 0
    assert disabled == ""


def test_a_preempted_request_is_decided_once_for_each_position(start: Start) -> None:
    batch = prompts(6, 30, 40, seed=4)
    plans = [controlled("holdatthree", prompt) for prompt in batch]
    roomy = start(max_num_seqs=6, **OPTIONS)
    load(roomy)
    expected = roomy.run(batch, plans, max_tokens=70)
    engine = start(max_num_seqs=6, num_gpu_blocks_override=9, **OPTIONS)
    load(engine)
    found = engine.run(batch, plans, max_tokens=70)
    assert sum(one.released.preemptions for one in found if one.released is not None) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.released is not None
        assert other.released is not None
        assert one.token_ids == other.token_ids
        gains = [np.array([own for _, own in x.gains]) for x in (one.released, other.released)]
        np.testing.assert_allclose(gains[0], gains[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("name", "reason"), [("failssoon", "no more"), ("notanumber", "nan")])
def test_a_controller_that_fails_is_disabled_alone(
    start: Start, models_root: Path, name: str, reason: str
) -> None:
    engine = start(max_num_batched_tokens=256, max_num_seqs=4, **OPTIONS)
    load(engine)
    reference = HfReference("llama", build("llama", models_root))
    batch = prompts(2, 20, 30, seed=3)
    failing, held = engine.run(
        batch, [controlled(name, batch[0]), controlled("holdatthree", batch[1])], max_tokens=TOKENS
    )
    check(held, reference, batch[1])
    (event,) = failing.disabled
    assert isinstance(event, ControllerDisabled)
    assert reason in event.reason
    assert event.first == len(batch[0]) + (2 if name == "failssoon" else 0)
    assert len(failing.token_ids) == TOKENS
    assert reason in engine.stats()["controllers"][name][-1]
    (later,) = engine.run(batch[:1], [controlled(name, batch[0])], max_tokens=2)
    assert [one.first for one in later.disabled] == [len(batch[0])]


@FORKED
def test_two_ranks_decide_alike(start: Start, models_root: Path) -> None:
    from vllm.v1.executor import multiproc_executor

    context = Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        engine = start(tensor_parallel_size=2, **OPTIONS)
        load(engine)
        reference = HfReference("llama", build("llama", models_root))
        batch = prompts(2, 20, 30, seed=3)
        plans = [controlled("holdatthree", batch[0]), controlled("failssoon", batch[1])]
        held, failing = engine.run(batch, plans, max_tokens=TOKENS)
        check(held, reference, batch[0])
        assert len(failing.disabled) == 1
