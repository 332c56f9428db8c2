"""Sweep over a real channel, on an engine whose answers follow from the rows that are replaced."""

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
import pytest

from rheostat_server.engine.backend import Delta, Job
from rheostat_server.errors import EngineLost
from rheostat_server.sweeps import sweep as sweeps
from rheostat_wire.v1 import (
    replace_pb2,
    run_service_pb2,
    sweep_pb2,
    sweep_service_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import (
    LAYERS,
)
from ..messages import selector, site_set, token_range, window
from ..streams import settled, until
from ..uploads import refusal_of
from ..watchers import Watcher, opening, rule
from .patched import (
    CLEAN,
    CORRUPT,
    POST,
    RIGHT,
    WRONG,
    Code,
    PatchedBackend,
    answer,
    grade,
    grid,
    logprob,
    order,
    pair,
    prompt,
    refused,
    site,
    swept,
)


async def test_a_cell_is_the_corrupt_prompt_with_clean_rows(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    started, *events, last = await rest(running.client.sweep.Sweep(order()))
    assert started.started.cell_count == LAYERS * 4
    assert list(started.started.columns) == ["0", "1", "2", "3"]
    assert [one.layer for one in started.started.rows] == [*range(LAYERS)]
    assert len(events) == LAYERS * 4
    for event in events:
        cell = event.cell
        change = (6 - 9) / (1 + site(cell.row)) if cell.column == 1 else 0
        assert list(cell.values) == [pytest.approx(logprob(sum(CORRUPT) + change))]
        assert cell.below_noise is (cell.column != 1)
        assert cell.top_token_id == 1
        assert grid(last.summary)[cell.row, cell.column] == cell.values[0]
    (graded,) = last.summary.grades
    assert graded.clean == pytest.approx(logprob(sum(CLEAN)))
    assert graded.corrupt == pytest.approx(logprob(sum(CORRUPT)))
    assert (graded.noise.sample_count, graded.noise.max, graded.peak) == (8, 0, 1)
    assert last.summary.computed_token_count == sum(len(job.prompt) for job in backend.jobs)
    runs = await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())
    assert not runs.runs
    await settled(running)


async def test_watches_pass_a_sweep_over_and_are_told_once(starter) -> None:
    running = await starter(PatchedBackend())
    watchers = [
        await Watcher.open(running, opening(rules=[rule(1e9)])),
        await Watcher.open(running, opening(steers=True)),
    ]
    events = await rest(running.client.sweep.Sweep(order()))
    assert events[-1].HasField("summary")
    assert {job.plan.private_from for job in running.backend.jobs} == {None}
    for watcher in watchers:
        await watcher.rest()
        (told,) = [event.ended for event in watcher.of("ended")]
        assert told.request_id == events[0].started.request_id
        assert told.missed_reason == "watches do not read sweeps"
        assert not watcher.of("begun")
    await settled(running)


async def test_a_sweep_is_refused_where_a_watch_may_stop_it(starter) -> None:
    running = await starter(PatchedBackend())
    watcher = await Watcher.open(running, opening(rules=[rule(1e9, stop={})]))
    refusal = await refusal_of(running.client.sweep.Sweep(order()).read())
    assert refusal.reason == "REASON_NOT_SUPPORTED"
    assert not running.backend.jobs
    await watcher.rest()
    await rest(running.client.sweep.Sweep(order()))


@dataclass
class DriftingBackend(PatchedBackend):
    """Answers unchanged prompts differently after a while."""

    baselines: int = 0
    drift_after: int = 0

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        unchanged = job.prompt == CORRUPT and not job.plan.acts
        async for delta in super().generate(job):
            if unchanged and job.sampling.only_token is not None:
                self.baselines += 1
                if self.baselines > self.drift_after:
                    delta.logprobs[0].token.logprob += 0.01
            yield delta


@pytest.mark.parametrize("zoom", [None, sweep_pb2.Zoom(layer_stride=2, column_stride=2)])
async def test_baselines_run_among_the_first_cells_and_all_others(starter, zoom) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    ids = list(range(20, 60))
    one = pair(prompt=prompt(*ids), corrupt=prompt(*ids[:5], 99, *ids[6:]))
    request = order(one, zoom=zoom, max_concurrent_cells=2, baseline_count=9)
    cells, summary = await swept(running, request)
    assert summary.grades[0].noise.sample_count == 9
    asked = [bool(job.plan.acts) for job in backend.asked if job.prompt[5] == 99]
    baselines = [number for number, cell in enumerate(asked) if not cell]
    assert len(baselines) == 9
    assert baselines[4] < 12  # five are waited for
    gaps = np.diff([*baselines[4:], len(asked)])
    assert gaps.max() < len(cells) / 2
    assert baselines[-1] > len(cells) / 2


@dataclass
class HeldBaselines(PatchedBackend):
    """Answers the corrupt prompt four times, and then only once `free` is set."""

    free: asyncio.Event = field(default_factory=asyncio.Event)
    baselines: int = 0

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        unchanged = not job.plan.acts and job.prompt == CORRUPT
        self.baselines += unchanged and job.sampling.only_token is not None
        self.room = self.free if unchanged and self.baselines > 4 else None
        async for delta in super().generate(job):
            yield delta


async def test_no_cell_waits_for_late_baselines(starter) -> None:
    backend = HeldBaselines()
    running = await starter(backend)
    call = running.client.sweep.Sweep(order(max_concurrent_cells=1))
    await call.read()
    assert (await call.read()).HasField("cell")
    backend.free.set()
    await rest(call)


async def test_late_baselines_widen_the_noise(starter) -> None:
    running = await starter(DriftingBackend(drift_after=4))
    cells, summary = await swept(running, order(max_concurrent_cells=1))
    noise = summary.grades[0].noise
    assert noise.mean == pytest.approx(logprob(sum(CORRUPT)))
    assert (noise.max, noise.sample_count) == (pytest.approx(0.01), 8)
    assert noise.std == pytest.approx(np.std([0.01] * 4 + [0] * 4, ddof=1))
    graded = [(cell, abs(cell.values[0] - noise.mean)) for cell in cells.values()]
    assert any(not cell.below_noise and size > noise.max for cell, size in graded)
    assert all(size <= noise.max for cell, size in graded if cell.below_noise)


async def test_a_single_baseline_is_waited_for(starter) -> None:
    running = await starter(PatchedBackend())
    _, summary = await swept(running, order(baseline_count=1))
    assert summary.grades[0].noise.sample_count == 1


async def test_every_metric_of_alternatives_of_several_tokens(starter) -> None:
    running = await starter(PatchedBackend())
    names = ("LOGPROB", "PROBABILITY", "LOGIT_DIFFERENCE", "RANK")
    one = pair(answer=answer((3, 10), (3, 11), (20,)))
    request = order(one, grades=[*map(grade, names)], where=selector(window(0, 1)))
    cells, _ = await swept(running, request)
    base = sum(CORRUPT)
    paths = [
        logprob(base, 3) + logprob(base + 3, 10),
        logprob(base, 3) + logprob(base + 3, 11),
        logprob(base, 20),
    ]
    right = float(np.logaddexp.reduce(paths))
    for cell in cells.values():
        assert list(cell.values) == [
            pytest.approx(right),
            pytest.approx(math.exp(right)),
            pytest.approx(right - logprob(base, WRONG)),
            10.0,
        ]


async def test_questions_that_answers_share_are_asked_once(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    one = pair(answer=answer((3, 10), (3, 11)), foil=answer((3,)))
    request = order(one, where=selector(window(1, 2)), grades=[grade("LOGIT_DIFFERENCE")])
    request.max_concurrent_cells = 1
    await swept(running, request)
    cells = [job for job in backend.asked if job.plan.acts]
    asked = [(job.prompt[4:], job.sampling.only_token) for job in cells[:3]]
    assert len(cells) == 3 * LAYERS
    assert sorted(asked) == [((), 3), ((3,), 10), ((3,), 11)]


async def test_recovered_parts_and_errors_over_pairs(starter) -> None:
    running = await starter(PatchedBackend())
    pairs = [pair(), pair(prompt=prompt(1, 2, 3, 4), corrupt=prompt(1, 12, 3, 4))]
    request = order(*pairs, grades=[grade(recovered=True), grade()], pair_values=True)
    cells, summary = await swept(running, request)
    for cell in cells.values():
        part = 1 / (1 + site(cell.row)) if cell.column == 1 else 0
        assert cell.values[0] == pytest.approx(part)
        assert cell.standard_errors[0] == pytest.approx(0, abs=1e-6)
        each = np.reshape(cell.pair_values, (2, 2))
        assert each[:, 0] == pytest.approx([part, part], abs=1e-6)
        assert cell.values[1] == pytest.approx(each[:, 1].mean())
        assert cell.standard_errors[1] == pytest.approx(each[:, 1].std(ddof=1) / math.sqrt(2))
    assert summary.grades[0].noise.mean == pytest.approx(0)


async def test_windows_replace_several_layers_as_far_as_there_are_some(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    for width, expected in ((2, [(0, 1), (1, 2), (2,)]), (3, [(0, 1), (0, 1, 2), (1, 2)])):
        backend.asked.clear()
        request = order(layer_window=width, where=selector(window(1, 2)), max_concurrent_cells=1)
        await swept(running, request)
        replaced = [
            tuple(row[0] for act in job.plan.acts for row in act.rows)
            for job in backend.asked
            if job.plan.acts
        ]
        assert replaced == [tuple(map(site, layers)) for layers in expected]


async def test_noise_puts_corrupt_rows_into_the_clean_prompt(starter) -> None:
    running = await starter(PatchedBackend())
    cells, _ = await swept(running, order(direction=sweep_pb2.SWEEP_DIRECTION_NOISE))
    for cell in cells.values():
        change = (9 - 6) / (1 + site(cell.row)) if cell.column == 1 else 0
        assert cell.values[0] == pytest.approx(logprob(sum(CLEAN) + change))


async def test_zeros_alpha_and_groups(starter) -> None:
    running = await starter(PatchedBackend())
    one = pair(
        zeros=replace_pb2.ZeroSource(),
        groups=[selector(window(0, 1), window(3, 4)), selector(window(1, 3))],
    )
    request = order(one, group_labels=["ends", "middle"], alpha=0.5)
    cells, summary = await swept(running, request)
    assert len(cells) == 2 * LAYERS
    for cell in cells.values():
        taken = (5 + 8, 6 + 7)[cell.column] * 0.5 / (1 + site(cell.row))
        assert cell.values[0] == pytest.approx(logprob(sum(CLEAN) - taken))
    assert not summary.grades[0].HasField("corrupt")


async def test_positions_without_partner_are_errors_of_their_cells(starter) -> None:
    running = await starter(PatchedBackend())
    request = order(pair(prompt=prompt(5, 6, 2, 7, 8)), where=selector(window(1, 4)))
    started, *events, last = await rest(running.client.sweep.Sweep(request))
    (resolved,) = started.started.pairs
    assert (resolved.alignment.prefix_token_count, resolved.alignment.suffix_token_count) == (1, 2)
    for event in events:
        if event.cell.column < 2:
            assert event.cell.error.code == Code.FAILED_PRECONDITION.value[0]
            assert event.cell.error.message.startswith("pairs[0]: a position")
        else:
            assert event.cell.values
    missing = [(one.start, one.count) for one in last.summary.missing]
    assert missing == [(0, 2), (3, 2), (6, 2)]


@pytest.mark.parametrize("direction", ["DENOISE", "NOISE"])
@pytest.mark.parametrize(
    ("clean", "corrupt"),
    [((*CLEAN, 2), CORRUPT), (CLEAN, (*CORRUPT, 2))],
    ids=["longer", "shorter"],
)
async def test_cells_past_the_shorter_of_two_identically_aligned_prompts_are_errors(
    starter, clean: tuple[int, ...], corrupt: tuple[int, ...], direction: str
) -> None:
    running = await starter(PatchedBackend())
    request = order(
        pair(prompt=prompt(*clean), corrupt=prompt(*corrupt)),
        alignment=replace_pb2.ALIGNMENT_IDENTITY,
        direction=sweep_pb2.SweepDirection.Value(f"SWEEP_DIRECTION_{direction}"),
    )
    started, *events, last = await rest(running.client.sweep.Sweep(request))
    base, source = (corrupt, clean) if direction == "DENOISE" else (clean, corrupt)
    shorter = min(len(clean), len(corrupt))
    past = range(shorter, len(clean))
    for event in events:
        cell = event.cell
        if cell.column in past:
            assert cell.error.code == Code.FAILED_PRECONDITION.value[0]
            assert "no partner" in cell.error.message
            assert cell.error.message.endswith("which differs there or is shorter")
            continue
        change = (source[cell.column] - base[cell.column]) / (1 + site(cell.row))
        assert cell.values[0] == pytest.approx(logprob(sum(base) + change))
    (resolved,) = started.started.pairs
    unaligned = [
        p for one in resolved.alignment.unaligned for p in range(one.start, one.start + one.count)
    ]
    assert unaligned == [*past]
    columns = len(started.started.columns)
    missing = [i for one in last.summary.missing for i in range(one.start, one.start + one.count)]
    assert missing == [row * columns + column for row in range(LAYERS) for column in past]


async def test_groups_that_reach_past_the_shorter_prompt_are_errors_as_a_whole(starter) -> None:
    running = await starter(PatchedBackend())
    one = pair(
        prompt=prompt(*CLEAN, 2),
        groups=[selector(window(1, 2)), selector(window(1, 2), window(4, 5))],
    )
    request = order(one, group_labels=["in", "past"], alignment=replace_pb2.ALIGNMENT_IDENTITY)
    cells, _ = await swept(running, request)
    assert [cell.HasField("error") for _, cell in sorted(cells.items())] == [False, True] * LAYERS


@pytest.mark.parametrize(
    "direction", [sweep_pb2.SWEEP_DIRECTION_NOISE, sweep_pb2.SWEEP_DIRECTION_DENOISE]
)
async def test_prompts_without_common_tokens_have_no_cell(starter, direction) -> None:
    running = await starter(PatchedBackend())
    strange = pair(prompt=prompt(1, 2, 3), corrupt=prompt(11, 12))
    cells, summary = await swept(running, order(strange, direction=direction))
    assert all("no partner" in cell.error.message for cell in cells.values())
    assert sum(one.count for one in summary.missing) == len(cells) == 3 * LAYERS


async def test_what_is_done_is_not_run_again(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    done = [sweep_pb2.CellRun(start=0, count=5), sweep_pb2.CellRun(start=9, count=1)]
    cells, summary = await swept(running, order(done=done))
    assert sorted(cells) == [5, 6, 7, 8, 10, 11]
    assert sum(bool(job.plan.acts) for job in backend.asked) == 6
    assert [(one.start, one.count) for one in summary.missing] == [(0, 5), (9, 1)]


async def test_a_client_that_goes_away_leaves_nothing(starter) -> None:
    backend = PatchedBackend(room=asyncio.Event())
    running = await starter(backend)
    call = running.client.sweep.Sweep(order())
    await call.read()
    await until(lambda: backend.at_once > 0)
    call.cancel()
    await until(lambda: backend.at_once == 0)
    await settled(running)
    runs = await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())
    assert not runs.runs
    backend.room = None
    await swept(running, order())


async def test_a_slow_reader_stops_the_sweep_until_it_reads(starter, monkeypatch) -> None:
    monkeypatch.setattr(sweeps, "_EVENTS", 2)
    running = await starter(PatchedBackend())
    call = running.client.sweep.Sweep(order(where=selector(window(0, 4))))
    await asyncio.sleep(0.2)
    assert len(await rest(call)) == LAYERS * 4 + 2


async def test_events_that_are_ready_together_are_sent_together(monkeypatch) -> None:
    cells = [sweep_pb2.SweepCell(index=number) for number in range(1, 10)]
    events = [sweep_service_pb2.SweepResponse(cell=cell) for cell in cells]

    async def run(put) -> None:
        for event in events[:8]:
            await put(event)
        await asyncio.sleep(0.01)
        await put(events[8])
        raise EngineLost("it died")

    monkeypatch.setattr(sweeps, "_TOGETHER_BYTES", sum(event.ByteSize() for event in events[:4]))
    received = []

    async def read() -> None:
        async for together in sweeps._streamed(run):
            received.append([event.cell.index for event in together])

    with pytest.raises(EngineLost):
        await read()
    assert received == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]


@pytest.mark.parametrize("iterations", [*range(0, 16, 2), 50])
async def test_the_engines_end_ends_the_sweep(starter, iterations: int) -> None:
    backend = PatchedBackend(room=asyncio.Event())
    running = await starter(backend)
    call = running.client.sweep.Sweep(order())
    await call.read()
    for _ in range(iterations):  # it may come while rows are captured
        await asyncio.sleep(0)
    backend.lost("it died")
    refusal = await refusal_of(rest(call))
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "REASON_ENGINE_LOST")
    assert EngineLost.reason == refusal.reason


async def test_runs_that_are_kept_are_named(starter) -> None:
    running = await starter(PatchedBackend())
    request = order(sites=site_set(POST, types_pb2.POINT_MLP_OUT, layers=[0, 1]))
    request.keep_runs.FromSeconds(60)
    _, summary = await swept(running, request)
    listed = await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())
    assert sorted(summary.run_ids) == sorted(run.run_id for run in listed.runs)
    assert [len(run.sites) for run in listed.runs] == [2, 2]


async def test_means_of_some_of_a_runs_positions(starter) -> None:
    running = await starter(PatchedBackend())
    request = order(sites=site_set(POST, layers=[1]))
    request.keep_runs.FromSeconds(60)
    _, summary = await swept(running, request)
    (run_id,) = summary.run_ids
    for positions, mean in (([0, -1], (CLEAN[0] + CLEAN[-1]) / 2), (None, sum(CLEAN) / 4)):
        source = replace_pb2.MeanSource(run_id=run_id)
        if positions is not None:
            source.positions.positions.extend(positions)
        cells, _ = await swept(running, order(pair(mean=source), sites=site_set(POST, layers=[1])))
        for cell in cells.values():
            change = (mean - CLEAN[cell.column]) / (1 + site(1))
            assert cell.values[0] == pytest.approx(logprob(sum(CLEAN) + change))
    for positions in ([4], [0, 0]):
        source.positions.positions[:] = positions
        refusal = await refused(running, order(pair(mean=source), sites=site_set(POST, layers=[1])))
        assert refusal.brief[2].startswith("pairs[0].mean.positions")


@dataclass
class OddBackend(PatchedBackend):
    """Gives tokens from `odd` on other log-probabilities, of replaced prompts or of all."""

    odd: int = WRONG
    logprob: float = math.nan
    replaced_only: bool = True

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        async for delta in super().generate(job):
            only = job.sampling.only_token
            if only is not None and only >= self.odd and (job.plan.acts or not self.replaced_only):
                delta.logprobs[0].token.logprob = self.logprob
            yield delta


async def test_a_cell_whose_answer_is_no_number_has_an_error(starter) -> None:
    running = await starter(OddBackend(odd=RIGHT))
    cells, summary = await swept(running, order())
    assert {cell.error.code for cell in cells.values()} == {Code.INVALID_ARGUMENT.value[0]}
    assert all("METRIC_LOGPROB is nan" in cell.error.message for cell in cells.values())
    assert sum(one.count for one in summary.missing) == len(cells)


async def test_a_prompt_whose_answer_is_no_number_ends_the_sweep(starter) -> None:
    running = await starter(OddBackend(odd=RIGHT, replaced_only=False))
    refusal = await refused(running, order())
    assert (refusal.reason, refusal.field) == ("REASON_NON_FINITE", "pairs[0]")
    await settled(running)


async def test_an_answer_without_probability_has_no_logarithm(starter) -> None:
    running = await starter(OddBackend(odd=20, logprob=-math.inf, replaced_only=False))
    one = pair(answer=answer((20,)))
    cells, _ = await swept(running, order(one, grades=[grade("PROBABILITY")]))
    assert all(list(cell.values) == [0.0] for cell in cells.values())
    refusal = await refused(running, order(one, grades=[grade("PROBABILITY"), grade()]))
    assert (refusal.reason, refusal.field) == ("REASON_NON_FINITE", "pairs[0]")
    assert "METRIC_LOGPROB is -inf" in refusal.message


async def test_an_id_is_taken_while_its_sweep_runs(starter) -> None:
    backend = PatchedBackend(room=asyncio.Event())
    running = await starter(backend)
    call = running.client.sweep.Sweep(order(request_id="mine"))
    await call.read()
    assert (await refused(running, order(request_id="mine"))).code is Code.ALREADY_EXISTS
    assert backend.room is not None
    backend.room.set()
    await rest(call)
    await swept(running, order(request_id="mine"))


async def test_few_sweeps_run_at_a_time(starter, monkeypatch) -> None:
    monkeypatch.setattr(sweeps, "SWEEPS", 1)
    backend = PatchedBackend(room=asyncio.Event())
    running = await starter(backend)
    call = running.client.sweep.Sweep(order())
    await call.read()
    refusal = await refused(running, order())
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "REASON_QUEUE_FULL")
    call.cancel()


async def test_token_ids_select_columns(starter) -> None:
    running = await starter(PatchedBackend())
    request = order(where=selector(token_range(7, 8)))
    started, *_ = await rest(running.client.sweep.Sweep(request))
    assert list(started.started.columns) == ["2", "3"]
