"""The benchmark of isolation: what hostile calls are, how they are counted, what the table says."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import rheostat
from rheostat_bench import isolation, soak
from rheostat_bench.abuse import GENERATE, Target
from rheostat_bench.calls import HUNG_UP, Call, Caller, Outcome, connect, expected, make
from rheostat_bench.neighbour import Heard, Job, Neighbour
from rheostat_bench.scenarios import SCENARIOS, Scenario, prepared
from rheostat_bench.served_process import Handles, faults, handles, memory_of, write_model
from rheostat_bench.soak import MORE_HANDLES, Soaked, mixture
from rheostat_bench.summaries import percentile
from rheostat_bench.tables import tables
from rheostat_server.engine.vllm_engine import DEMO_MODEL
from rheostat_wire.v1 import generation_service_pb2

from ..server.conftest import Running
from ..server.fakes import Paced
from ..server.messages import request

TARGET = Target(layers=3, width=4, vocabulary=128, context=64, sink="disk")
SMALL = 0.001
JOB = Job(("abc", "b"), 5, rheostat.Capture("resid_post", layers=1))
HEARD = Heard(2.0, (0.04, 0.3), (0.1,), 100, 4, 0, 0, {}, (0.002,), first_requests=("a",))
OUTCOME = Outcome(8, 1 << 20, {"OK": 7, "INTERNAL": 1}, {"INTERNAL": "a defect"}, 2.0, 0.5)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_a_scenario_gives_equal_calls_for_equal_seeds(scenario: Scenario) -> None:
    for seed in range(4):
        first, again = (scenario.make(TARGET, random.Random(seed), SMALL) for _ in range(2))
        assert first == again
        assert all(first.messages) or first.method.endswith(("GetModel", "GetStats", "ListSinks"))
        service, _, rpc = first.method.partition("/")
        assert service.endswith("Service")
        assert rpc


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
async def test_a_server_answers_every_scenario_in_the_contracts_words(
    running: Running, scenario: Scenario
) -> None:
    """None of them is broken off by gRPC, or refused for a slip that was not meant."""
    target = f"127.0.0.1:{running.server.port}"
    async with connect(target) as channel:
        for seed in range(6):
            call = scenario.make(TARGET, random.Random(seed), SMALL)
            ending = await asyncio.wait_for(make(channel, target, call), 60)
            assert expected(ending.code), ending
            if scenario.name != "malformed messages":
                assert ending.reason != "REASON_MISSING_FIELD", ending


def test_prepared_calls_grow_with_the_size() -> None:
    for scenario in SCENARIOS:
        small = prepared(scenario.name, TARGET, 0, SMALL)
        assert len(small) == scenario.variants
    few, many = (prepared("long stop texts", TARGET, 0, size) for size in (SMALL, 0.01))
    assert max(one.nbytes for one in few) < max(one.nbytes for one in many)


async def test_calls_are_counted_by_how_they_ended(running: Running) -> None:
    ok = Call("EngineService/GetModel", (b"",))
    wrong = Call("GenerationService/Generate", (b"",))
    caller = Caller(f"127.0.0.1:{running.server.port}")
    assert await caller.prepare(lambda: [ok, wrong, ok]) == 3
    outcome = await caller.run(at_once=2, seconds=None)
    assert outcome.calls == 3
    assert outcome.endings == {"OK": 2, "INVALID_ARGUMENT REASON_MISSING_FIELD": 1}
    assert outcome.sentences["INVALID_ARGUMENT REASON_MISSING_FIELD"]


async def test_calls_are_made_over_and_over_until_the_time_is_over(running: Running) -> None:
    assert running.backend.hold is None
    running.backend.hold = asyncio.Event()
    held = Call("GenerationService/Generate", (request().SerializeToString(),))
    caller = Caller(f"127.0.0.1:{running.server.port}")
    await caller.prepare(lambda: [held])
    outcome = await caller.run(at_once=3, seconds=0.5)
    assert outcome.endings == {"open at the end": 3}
    await caller.prepare(lambda: [Call("EngineService/GetModel", (b"",))])
    assert (await caller.run(at_once=3, seconds=0.5)).endings["OK"] > 3


async def test_a_client_that_stops_reading_holds_the_call_and_then_cancels_it(
    running: Running,
) -> None:
    running.backend.hold = asyncio.Event()
    message = request().SerializeToString()
    call = Call("GenerationService/Generate", (message,), reads=1, holds=0.3)
    target = f"127.0.0.1:{running.server.port}"
    async with connect(target) as channel:
        began = time.monotonic()
        assert await make(channel, target, call) == HUNG_UP
    assert time.monotonic() - began >= 0.3
    while not running.backend.aborted:
        await asyncio.sleep(0.01)


async def test_a_call_that_streams_is_sent_message_by_message(running: Running) -> None:
    kind = generation_service_pb2.SessionRequest
    start = kind(start=request()).SerializeToString()
    stop = kind(update_id=1, stop=generation_service_pb2.SessionStop()).SerializeToString()
    call = Call("GenerationService/Session", (start, stop), pause=0.05, own_connection=True)
    target = f"127.0.0.1:{running.server.port}"
    async with connect(target) as channel:
        assert (await make(channel, target, call)).code == "OK"


async def until(neighbour: Neighbour, since: float, holds: Callable[[Heard], object]) -> Heard:
    """What the neighbour got, as soon as it is so."""
    async with asyncio.timeout(60):
        while not holds(heard := await neighbour.heard(since)):
            await asyncio.sleep(0.01)
    return heard


async def test_the_neighbour_times_its_tokens_and_checks_its_answers(starter) -> None:
    running = await starter(Paced(pause=0.01))  # tokens that come at once are one message
    neighbour = Neighbour(f"127.0.0.1:{running.server.port}")
    await neighbour.start(JOB)
    since = await neighbour.now()
    heard = await until(neighbour, since, lambda heard: heard.generations > 1 and heard.pings)
    assert heard.gaps
    assert heard.firsts
    assert (heard.different_texts, heard.different_rows, heard.failures) == (0, 0, {})
    await neighbour.close()


async def test_the_neighbour_notices_rows_that_are_missing(running: Running) -> None:
    neighbour = Neighbour(f"127.0.0.1:{running.server.port}")
    await neighbour.start(JOB)
    running.backend.hold = asyncio.Event()
    await asyncio.sleep(0.1)
    running.backend.lost_positions = frozenset({1})
    since = await neighbour.now()
    running.backend.hold.set()
    await until(neighbour, since, lambda heard: heard.different_rows or heard.failures)
    await neighbour.close()


async def test_a_wait_that_has_not_ended_counts(running: Running) -> None:
    neighbour = Neighbour(f"127.0.0.1:{running.server.port}")
    await neighbour.start(JOB)
    running.backend.hold = asyncio.Event()
    await asyncio.sleep(0.5)  # until tokens that were on their way have come
    since = await neighbour.now()
    await asyncio.sleep(0.3)
    heard = await neighbour.heard(since)
    assert len((*heard.gaps, *heard.firsts)) == 1
    assert heard.longest >= 0.3
    await neighbour.close()


def turn(**fields: object) -> isolation.Turn:
    sound = isolation.Turn(HEARD, OUTCOME, memory_of(1), memory_of(1), 0, False)
    return sound._replace(**fields)


def test_the_table_has_the_waits_and_what_was_broken() -> None:
    slow = turn()
    quick = turn(heard=HEARD._replace(gaps=(0.04, 0.05)))
    lossy = turn(heard=HEARD._replace(gaps=(0.04,), failures={"DATA_LOSS": 2}))
    a, b, c = (scenario.name for scenario in SCENARIOS[:3])
    table = isolation.summary({isolation.BUSY: slow, a: slow, b: quick, c: lossy})
    assert table[a]["longest_gap_ms"] == pytest.approx(300)
    assert table[a]["longest_ms"] == pytest.approx(300)
    assert table[a]["tokens_per_s"] == 50
    assert table[a]["calls_per_s"] == 4
    assert table[a]["caller_cpu"] == 0.25
    assert isolation.misses(table) == [
        f"{a}: 300 ms between tokens",
        f"{a}: unexpected 1",
        f"{b}: unexpected 1",
        f"{c}: failed 2",
        f"{c}: unexpected 1",
    ]


def test_a_first_token_waits_for_earlier_prompts_and_then_not_longer_than_the_bar() -> None:
    scenario = SCENARIOS[0].name
    sound = turn(outcome=OUTCOME._replace(endings={"OK": 8}))

    def missed(*firsts: float, behind: dict[str, float]) -> list[str]:
        requests = tuple("abc"[: len(firsts)])
        heard = HEARD._replace(gaps=(0.04,), firsts=firsts, first_requests=requests)
        table = isolation.summary({scenario: sound._replace(heard=heard, behind=behind)})
        assert table[scenario]["first_token_longest_ms"] == pytest.approx(1000 * max(firsts))
        return isolation.misses(table)

    assert missed(0.2, behind={}) == []
    assert missed(0.3, behind={"b": 0.2}) == [f"{scenario}: 300 ms for a first token"]
    assert missed(1.1, behind={"a": 0.9}) == []
    assert missed(1.1, behind={"a": 0.8}) == [f"{scenario}: 300 ms for a first token"]
    assert missed(1.1, 0.26, behind={"a": 0.9}) == [f"{scenario}: 260 ms for a first token"]


def test_a_soak_reports_everything_that_is_wrong() -> None:
    endings = {"OK": 7, "INVALID_ARGUMENT REASON_X": 1}
    sound = Soaked(
        OUTCOME._replace(endings=endings), HEARD, HEARD, {"run_count": 0}, MORE_HANDLES, []
    )
    assert sound.problems() == []
    bad = Soaked(
        OUTCOME,
        HEARD._replace(different_texts=1, failures={"DATA_LOSS": 3}),
        HEARD._replace(different_rows=2),
        {"run_count": 0, "leaked_count": 1},
        Handles(MORE_HANDLES.descriptors + 1, MORE_HANDLES.threads),
        ["Traceback"],
    )
    assert bad.problems() == [
        "leaked_count is +1 at the end",
        f"+{MORE_HANDLES.descriptors + 1} descriptors at the end",
        "log: Traceback",
        "1 calls ended with INTERNAL: a defect",
        "the streaming client: 1 other texts than on a quiet server",
        "the streaming client: 3 times DATA_LOSS",
        "the capturing client: 2 answers with other rows",
    ]
    assert sound._replace(capturing=HEARD._replace(generations=0)).problems() == [
        "the capturing client: no generation has ended"
    ]


def test_a_soak_reports_tokens_that_came_too_late_apart() -> None:
    """A short soak among the tests asserts `problems` alone, because other tests delay tokens."""
    late = HEARD._replace(own_gaps=(0.04, 0.26, 0.3))
    found = Soaked(OUTCOME._replace(endings={"OK": 8}), late, HEARD, {}, MORE_HANDLES, [])
    assert found.problems() == []
    assert found.late() == [
        "the streaming client: 2 waits between tokens above 250 ms; the longest took 300 ms"
    ]
    assert found._replace(streaming=HEARD._replace(own_gaps=(0.25,))).late() == []


def test_handles_are_those_of_a_process_and_its_descendants(tmp_path: Path) -> None:
    before = handles(os.getpid())
    script = "import sys; print(flush=True); sys.stdin.read()"
    with (
        (tmp_path / "file").open("w"),
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        now = handles(os.getpid())
        child.communicate()
    # The file, two ends of pipes, and the child's own three.
    assert now.descriptors >= before.descriptors + 6
    assert now.threads > before.threads


def test_a_mixture_is_that_of_its_seed_however_it_is_cut() -> None:
    whole = mixture(TARGET, 3, 0, 40)
    assert whole == mixture(TARGET, 3, 0, 15) + mixture(TARGET, 3, 15, 25)
    assert whole[15].name.startswith("call 15 (")
    assert whole != mixture(TARGET, 4, 0, 40)


def test_the_control_of_a_soak_asks_the_engine_for_as_much_and_nothing_else() -> None:
    generate = generation_service_pb2.GenerateRequest
    counted = 0
    pairs = zip(mixture(TARGET, 3, 0, 200), mixture(TARGET, 3, 0, 200, control=True), strict=True)
    for hostile, plain in pairs:
        if plain.method != GENERATE:
            assert (plain.method, plain.holds) == ("CaptureService/ListSinks", hostile.holds)
            continue
        request = generate.FromString(plain.messages[0])
        assert {field.name for field, _ in request.ListFields()} <= {
            "text",
            "token_ids",
            "sampling",
        }
        assert {field.name for field, _ in request.sampling.ListFields()} <= {
            "max_tokens",
            "n",
            "temperature",
            "ignore_eos",
        }
        assert (plain.reads, plain.holds) == (hostile.reads, hostile.holds)
        if hostile.method == GENERATE:
            full = generate.FromString(hostile.messages[0])
            assert len(request.token_ids.ids) == len(full.token_ids.ids)
            assert request.sampling.max_tokens == full.sampling.max_tokens
            assert request.sampling.n == max(1, full.sampling.n) * (1 + full.with_baseline)
            counted += 1
    assert counted > 50


def test_a_soak_is_shown_beside_its_control(tmp_path: Path) -> None:
    figures = {
        "longest_ms": 284.4,
        "p99_9_ms": 200.0,
        "p99_ms": 150.0,
        "median_ms": 40.0,
        "first_token_longest_ms": 500.0,
        "first_token_p99_ms": 400.0,
        "over_bar": 3,
        "own_over_bar": 2,
        "first_tokens_over_bar": 4,
        "tokens": 12345,
        "generations": 99,
        "different_texts": 1,
        "different_rows": 2,
        "failed": 3,
    }
    content = {"benchmark": "soak", "bar_ms": 250.0, "streaming": figures, "capturing": figures}
    path, control = tmp_path / "soak.json", tmp_path / "soak-control.json"
    path.write_text(json.dumps(content))
    (alone,) = tables(path)
    assert "| longest wait between tokens, ms | 284 | 284 |" in alone
    assert "also without the time that the host took | 2 | 2 |" in alone
    assert "| answers that differ or failed | 6 | 6 |" in alone
    quiet = {**figures, "longest_ms": 260.0}
    control.write_text(json.dumps({**content, "benchmark": "soak, control", "streaming": quiet}))
    (both,) = tables(path)
    assert "| longest wait between tokens, ms | 284 | 284 | 260 | 284 |" in both
    assert tables(control) == []


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    assert percentile([3.0, 1.0, 4.0, 2.0], share) == expected
    assert percentile([], share) == 0.0


@pytest.mark.parametrize("benchmark", [isolation, soak])
def test_rheostat_serve_has_every_option_that_the_benchmarks_start_it_with(
    benchmark: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    command = [sys.executable, "-m", "rheostat", "serve", str(nowhere), "--port", "0"]
    ended = subprocess.run([*command, *benchmark.options(tmp_path)], check=False)
    assert f"no model folder {nowhere}" in capfd.readouterr().err
    assert ended.returncode == 4


def test_faults_are_lines_of_the_log_from_an_offset_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("12:00 ERROR one\n12:01 INFO fine\n")
    offset = log.stat().st_size
    with log.open("a") as more:
        more.write("12:02 INFO fine\nTraceback (most recent call last):\n")
    assert faults(log) == ["12:00 ERROR one", "Traceback (most recent call last):"]
    assert faults(log, offset) == ["Traceback (most recent call last):"]


def test_the_model_has_as_many_layers_as_an_8b_model_and_a_tokenizer(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    bundled = json.loads((DEMO_MODEL / "config.json").read_text())
    assert config["num_hidden_layers"] == 36
    assert config["vocab_size"] == bundled["vocab_size"]
    assert (path / "tokenizer.json").is_file()
