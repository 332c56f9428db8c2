"""However a steered request ends, nothing of it stays; and who fails, fails alone.

The fixture `engine` looks after each test whether the bank is empty and nothing is leaked.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import rheostat
from rheostat import Capture, generated, token_ids, window
from rheostat._client.requests import generate_request

from .conftest import Server, assert_empty
from .naive import (
    OPS,
    everywhere,
    put_stored,
    replace_by_rows,
    replace_by_run,
    row,
)

pytestmark = pytest.mark.integration

PROMPT = "My day was"
LONG = {"max_tokens": 480, "temperature": 0, "ignore_eos": True}
ATTEMPTS = 5
"""How often calls are made during a request, at most, until it still runs after them.

On a busy machine a request may end before the calls that follow its first token.
"""


ROWS = {
    "run": (replace_by_run(), generated(0, 300)),
    "rows": (replace_by_rows(range(2, 8), 2), generated(0, 4)),
}
"""Replacements by a row of each position from 2 on, and the generated tokens that they select."""
GATED = "gated"
"""An addition under a gate that every token opens."""
NAMES = [*OPS, *ROWS, GATED]


@pytest.fixture
def stored(engine: rheostat.Engine) -> Iterator[None]:
    """The run "stored" is there."""
    put_stored(engine, [1, 3])
    yield
    if any(run.id == "stored" for run in engine.runs()):
        engine.delete_run("stored")


def _mood(vector: rheostat.Vector | None = None) -> rheostat.Probe:
    """Reads before all that acts."""
    return rheostat.probe(vector or rheostat.inline(row(9)), points="resid_post", layers=0)


def _weak(name: str) -> list[rheostat.Intervention]:
    """An op on the prompt, and on generated tokens by their ids: bank, slots and rules in use."""
    if name in ROWS:
        rows, where = ROWS[name]
        return [rows.does.at(points="resid_post", layers=[1, 3], where=window(2) | where)]
    if name == GATED:
        return [one.when(_mood().above(-1e6)) for one in _weak("add")]
    op = OPS[name].does.at(points="resid_post", layers=[1, 3])
    if OPS[name].acts_last:
        return [op.at(where="prompt"), op.at(where=generated(1, 30))]
    return [op.at(where="prompt"), op.at(where=token_ids(*range(300, 900)))]


def _aborted(engine: rheostat.Engine, server: Server, steering: list) -> None:
    stream = engine.stream(PROMPT, steering=steering, **LONG)
    next(stream)
    stream.cancel()


def _late(engine: rheostat.Engine, server: Server, steering: list) -> None:
    with pytest.raises(rheostat.DeadlineExceeded):
        engine.generate(PROMPT, steering=steering, timeout=0.2, **LONG)


def _vanished(engine: rheostat.Engine, server: Server, steering: list) -> None:
    gone = rheostat.connect(server.target)
    stream = gone.stream(PROMPT, steering=steering, n=3, **{**LONG, "temperature": 1.0})
    next(stream)
    gone.close()


def _stopped(engine: rheostat.Engine, server: Server, steering: list) -> None:
    plain = engine.generate(PROMPT, steering=steering, max_tokens=40, temperature=0)
    word = plain.text[2:5]
    out = engine.generate(PROMPT, steering=steering, max_tokens=40, temperature=0, stop=[word])
    assert (out.finish_reason, out.text) == ("stop", plain.text[: plain.text.index(word)])
    _check_rows(out, steering[0].gate is not None)


def _exhausted(engine: rheostat.Engine, server: Server, steering: list) -> None:
    out = engine.generate(PROMPT, steering=steering, max_tokens=7, n=3, seed=1, ignore_eos=True)
    assert {one.finish_reason for one in out.samples} == {"length"}
    _check_rows(out, steering[0].gate is not None)


def _ended_by_its_session(engine: rheostat.Engine, server: Server, steering: list) -> None:
    with engine.session(PROMPT, steering=steering, **LONG) as session:
        next(session)
        session.steer([everywhere(OPS["add"], [2]).ours])
        session.stop()
        for _ in session:
            pass
        assert session.result().finish_reason == "aborted"


def _check_rows(out: rheostat.Generation, gated: bool) -> None:
    """Positions and rows of the receipt agree, and stop where the samples do."""
    for applied in out.receipt.interventions:
        positions = {
            (rows.sample, position)
            for rows in applied.rows
            for run in rows.positions
            for position in run
        }
        one, other = (site.row_count - len(positions) for site in applied.sites)
        # Under a gate, a token that the scheduler computes beyond a sample's last is counted.
        assert 0 <= one == other <= gated * len(out.samples)
        for sample, position in positions:
            last = len(out.prompt_token_ids) + len(out.samples[sample].token_ids) - 2
            assert position <= last


ENDINGS = [_aborted, _late, _vanished, _stopped, _exhausted, _ended_by_its_session]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda one: one.__name__.strip("_"))
@pytest.mark.parametrize(
    "name",
    ["add", "norm_add", "ablate-three", "clamp-bands", "scale", "replace", "run", "rows", GATED],
)
def test_nothing_of_a_steered_request_stays(
    engine: rheostat.Engine,
    server: Server,
    stored: None,
    name: str,
    ending: Callable[..., None],
) -> None:
    ending(engine, server, _weak(name))


async def _end_of(client: rheostat.aio.Engine, number: int) -> str:
    """Runs a request that ends in the way that is its number's turn; how it ended."""
    options: dict[str, object] = {
        "steering": _weak(NAMES[number % len(NAMES)]),
        "capture": Capture("resid_mid", layers=[number % 6]) if number % 3 == 0 else None,
        "n": 1 + number // 4 % 2,
        "seed": 1,
        "ignore_eos": True,
        **(
            {"max_tokens": 480},  # to be cancelled
            {"max_tokens": 480, "timeout": 0.1 * (number % 7 + 1)},
            {"max_tokens": 40 + number},
            {"max_tokens": 480, "stop": [" ", "a", "e", "i", "o"]},
        )[number % 4],
    }
    try:
        out = await client.generate(PROMPT, **options)
    except rheostat.DeadlineExceeded:
        return "late"
    except asyncio.CancelledError:
        return "cancelled"
    (reason,) = {one.finish_reason for one in out.samples}
    return reason


def test_requests_that_end_in_every_way_at_once_leave_nothing(
    engine: rheostat.Engine, server: Server, stored: None
) -> None:
    async def run() -> Counter[str]:
        async with rheostat.aio.connect(server.target) as client:
            tasks = [asyncio.create_task(_end_of(client, number)) for number in range(48)]
            while (await client.stats()).running_request_count < 12:
                await asyncio.sleep(0.02)
            for task in tasks[::4]:
                task.cancel()
            return Counter(await asyncio.gather(*tasks))

    assert asyncio.run(run()) == {"cancelled": 12, "late": 12, "length": 12, "stop": 12}
    assert_empty(engine)


@pytest.mark.parametrize("ablating", [False, True])
def test_a_name_that_is_moved_and_deleted_changes_nothing_for_who_runs(
    engine: rheostat.Engine, ablating: bool
) -> None:
    engine.vectors.put(row(0), name="kept")
    handle = rheostat.named("kept", points="resid_post", layers=2)
    steering = [rheostat.ablate(handle) if ablating else handle * 3.0]
    options = {**LONG, "max_tokens": 240}
    alone = engine.generate(PROMPT, steering=steering, **options)
    plain = engine.generate(PROMPT, **{**LONG, "max_tokens": 40})
    assert alone.token_ids[:40] != plain.token_ids
    for _ in range(ATTEMPTS):
        engine.vectors.put(row(0), name="kept")
        with (
            engine.stream(PROMPT, steering=steering, **options) as one,
            engine.stream(PROMPT, steering=steering, **options) as two,
        ):
            next(one)
            next(two)
            engine.vectors.put(row(1), name="kept")
            other = engine.generate(PROMPT, steering=steering, **{**LONG, "max_tokens": 2})
            engine.vectors.delete("kept")
            running = engine.stats().running_request_count
            outs = [one.result(), two.result()]
        for out in outs:
            digests = out.receipt.interventions[0].digests
            assert out.token_ids == alone.token_ids
            assert digests == alone.receipt.interventions[0].digests
        assert other.receipt.interventions[0].digests != digests
        if running == 2:  # when the name moved, and when it was deleted
            break
    assert running == 2
    with pytest.raises(rheostat.NotFound) as caught:
        engine.generate(PROMPT, steering=steering, **LONG)
    assert caught.value.reason == "REASON_NAME_NOT_FOUND"


def test_a_run_that_is_deleted_changes_nothing_for_who_uses_its_rows(
    engine: rheostat.Engine, stored: None
) -> None:
    rows, options = _weak("run"), {**LONG, "max_tokens": 240}
    alone = engine.generate(PROMPT, steering=rows, **options)
    for _ in range(ATTEMPTS):
        with engine.stream(PROMPT, steering=rows, n=1, **options) as stream:
            next(stream)
            engine.delete_run("stored")
            running = engine.stats().running_request_count
            out = stream.result()
        assert out.token_ids == alone.token_ids
        assert out.receipt.interventions == alone.receipt.interventions
        if running == 1:  # when the run was deleted
            break
        put_stored(engine, [1, 3])
    assert running == 1
    assert out.token_ids != engine.generate(PROMPT, **options).token_ids
    with pytest.raises(rheostat.NotFound) as caught:
        engine.generate(PROMPT, steering=rows, **LONG)
    assert caught.value.reason == "REASON_RUN_NOT_FOUND"


def test_who_names_what_is_missing_fails_alone(engine: rheostat.Engine, server: Server) -> None:
    options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    good, nobody = [everywhere(OPS["add"], [2]).ours], rheostat.named("nobody")
    missing = [
        ("REASON_NAME_NOT_FOUND", {"steering": [*good, _norm_add(nobody)]}),
        ("REASON_VECTOR_NOT_FOUND", {"steering": [_norm_add(rheostat.Vector("ab" * 32)), *good]}),
        ("REASON_LORA_NOT_FOUND", {"steering": good, "lora": "nobody"}),
        ("REASON_RUN_NOT_FOUND", {"steering": [*good, *_weak("run")]}),
        ("REASON_NAME_NOT_FOUND", {"steering": [good[0].when(_mood(nobody).above(0))]}),
        ("REASON_NAME_NOT_FOUND", {"rules": rheostat.Rule("grim", _mood(nobody).above(0))}),
        ("", {"steering": good}),
    ]
    alone = engine.generate(PROMPT, steering=good, **options)

    async def run() -> list[object]:
        async with rheostat.aio.connect(server.target) as client:
            return await asyncio.gather(
                *(client.generate(PROMPT, **more, **options) for _, more in missing * 4),
                return_exceptions=True,
            )

    for (reason, _), outcome in zip(missing * 4, asyncio.run(run()), strict=True):
        if reason:
            assert isinstance(outcome, rheostat.NotFound)
            assert outcome.reason == reason
        else:
            assert isinstance(outcome, rheostat.Generation)
            assert outcome.token_ids == alone.token_ids


def _norm_add(vector: rheostat.Vector) -> rheostat.Intervention:
    return rheostat.norm_add(vector).at(points="resid_post", layers=1)


def test_a_request_that_uses_a_name_sends_fewer_than_300_bytes_for_it(
    engine: rheostat.Engine,
) -> None:
    engine.vectors.put(row(0).repeat(4, axis=0), name="a-name-of-some-length/as-people-give-them")
    handle = rheostat.named("a-name-of-some-length/as-people-give-them")
    steering = (handle * 4.0).at(points="resid_post", layers=range(1, 5), where="generated")
    request = generate_request(PROMPT, steering=[steering], max_tokens=8, temperature=0)
    prompt = generate_request(PROMPT)
    assert request.ByteSize() - len(PROMPT.encode()) < 300
    assert request.ByteSize() - prompt.ByteSize() < 120
    out = engine.generate(PROMPT, steering=[steering], max_tokens=8, temperature=0)
    assert out.receipt.interventions[0].sites[0].row_count == len(out.token_ids) - 1
    engine.vectors.delete("a-name-of-some-length/as-people-give-them")
