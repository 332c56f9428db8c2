"""Sweeps over gRPC: every cell equals the same hooks in Hugging Face's model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import NamedTuple

import grpc
import numpy as np
import pytest
import torch

import rheostat
from rheostat_engine import Point, Site
from rheostat_wire.noise import normal_row
from rheostat_wire.v1 import (
    gate_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    replace_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    selector_pb2,
    steering_pb2,
    sweep_pb2,
    sweep_service_pb2,
    sweep_service_pb2_grpc,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from ..engine.reference import Change, Float, HfReference
from .conftest import Server

pytestmark = pytest.mark.integration

pb = sweep_service_pb2
LAYERS = 6
CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Willis Tower is in the city of"
LONGER = "My friend said that the Eiffel Tower is in the city of"
RIGHT, WRONG = " Paris", " Chicago"
POINTS = {
    "resid_post": (types_pb2.POINT_RESID_POST, Point.RESID_POST),
    "attn_out": (types_pb2.POINT_ATTN_OUT, Point.ATTN_OUT),
    "mlp_out": (types_pb2.POINT_MLP_OUT, Point.MLP_OUT),
}


class Services(NamedTuple):
    generation: generation_service_pb2_grpc.GenerationServiceStub
    runs: run_service_pb2_grpc.RunServiceStub
    sweeps: sweep_service_pb2_grpc.SweepServiceStub

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        message = generation_service_pb2.TokenizeRequest(text=text, add_special_tokens=special)
        return list(self.generation.Tokenize(message).token_ids.ids)

    def answer(self, *texts: str) -> sweep_pb2.Answer:
        ids = [types_pb2.TokenIds(ids=self.tokens(text, special=False)) for text in texts]
        return sweep_pb2.Answer(alternatives=ids)

    def pair(self, **fields: object) -> sweep_pb2.SweepPair:
        given = {"answer": self.answer(RIGHT), "foil": self.answer(WRONG), **fields}
        if not {"corrupt", "zeros", "mean", "run_id", "noise"} & given.keys():
            given["corrupt"] = types_pb2.Prompt(text=CORRUPT)
        given.setdefault("prompt", types_pb2.Prompt(text=CLEAN))
        return sweep_pb2.SweepPair(**given)

    def run_ids(self) -> set[str]:
        return {run.run_id for run in self.runs.ListRuns(run_service_pb2.ListRunsRequest()).runs}


def connected(server: Server) -> AbstractContextManager[Services]:
    """The services of a server."""
    return connected_to(server.target)


@contextmanager
def connected_to(target: str) -> Iterator[Services]:
    """The services of the server at an address."""
    with grpc.insecure_channel(target) as channel:
        yield Services(
            generation_service_pb2_grpc.GenerationServiceStub(channel),
            run_service_pb2_grpc.RunServiceStub(channel),
            sweep_service_pb2_grpc.SweepServiceStub(channel),
        )


@pytest.fixture
def services(server: Server) -> Iterator[Services]:
    with connected(server) as found:
        yield found


def grade(name: str, *, recovered: bool = False) -> sweep_pb2.Grade:
    metric = sweep_pb2.Metric.Value(f"METRIC_{name}")
    return sweep_pb2.Grade(token=sweep_pb2.TokenGrade(metric=metric), recovered=recovered)


def sites(*points: str, layers: Sequence[int] = range(LAYERS)) -> types_pb2.SiteSet:
    return types_pb2.SiteSet(
        points=[POINTS[point][0] for point in points], list=types_pb2.LayerList(layers=layers)
    )


def positions(*windows: tuple[int, int]) -> selector_pb2.Selector:
    return selector_pb2.Selector(
        include=[
            selector_pb2.Range(positions=selector_pb2.Window(start=start, end=end))
            for start, end in windows
        ]
    )


class Swept(NamedTuple):
    """The events of a sweep."""

    started: sweep_pb2.SweepStarted
    phases: list[sweep_pb2.SweepPhase]
    cells: dict[int, sweep_pb2.SweepCell]
    summary: sweep_pb2.SweepSummary

    def grid(self, grade: int = 0) -> Float:
        tensor = self.summary.grades[grade].values
        return np.frombuffer(tensor.inline, "<f8").reshape(tuple(tensor.shape))


def sweep(services: Services, *pairs: sweep_pb2.SweepPair, **fields: object) -> Swept:
    """A whole sweep, whose events are checked against each other."""
    given = {"sites": sites("resid_post"), "grades": [grade("LOGIT_DIFFERENCE")], **fields}
    request = pb.SweepRequest(pairs=pairs or [services.pair()], **given)
    first, *middle, last = services.sweeps.Sweep(request, timeout=300)
    cells = {one.cell.index: one.cell for one in middle if one.HasField("cell")}
    phases = [one.phase for one in middle if one.HasField("phase")]
    swept = Swept(first.started, phases, dict(sorted(cells.items())), last.summary)
    assert len(cells) + len(phases) == len(middle)
    assert len(cells) == swept.started.cell_count + sum(one.added_cell_count for one in phases)
    columns = len(swept.started.columns)
    for index, cell in cells.items():
        assert (cell.row * columns + cell.column, cell.HasField("error")) == (
            index,
            not cell.values,
        )
        for number, value in enumerate(cell.values):
            assert swept.grid(number)[cell.row, cell.column] == value
    return swept


def hooks(
    reference: HfReference,
    source: Sequence[int],
    site: Site,
    placed: Sequence[tuple[int, int]],
    alpha: float = 1.0,
) -> list[Change]:
    """Puts rows of one prompt at (position, position in that prompt) into another."""
    stream = torch.from_numpy(reference.run(source).streams[site.index])
    return [
        Change(site.index, lambda x, row=stream[other]: x + alpha * (row - x), [position])
        for position, other in placed
    ]


def logprobs(reference: HfReference, tokens: Sequence[int], changes: Sequence[Change]) -> Float:
    """The log-probabilities after a prompt: [vocabulary]."""
    found: Float = np.asarray(reference.run(tokens, changes).logprobs[-1], np.float64)
    return found


def assert_cells(
    services: Services, reference: HfReference, direction: str, point: str, window: int
) -> None:
    """Every cell of a sweep is what hooks give."""
    clean, corrupt = services.tokens(CLEAN), services.tokens(CORRUPT)
    (right,), (wrong,) = (services.tokens(text, special=False) for text in (RIGHT, WRONG))
    names = ("LOGPROB", "PROBABILITY", "LOGIT_DIFFERENCE", "RANK")
    swept = sweep(
        services,
        sites=sites(point),
        layer_window=window,
        direction=sweep_pb2.SweepDirection.Value(f"SWEEP_DIRECTION_{direction}"),
        grades=[*map(grade, names), grade("LOGIT_DIFFERENCE", recovered=True)],
    )
    base, source = (corrupt, clean) if direction == "DENOISE" else (clean, corrupt)
    unchanged = {
        name: logprobs(reference, tokens, [])
        for name, tokens in (("clean", clean), ("corrupt", corrupt))
    }
    differences = {name: one[right] - one[wrong] for name, one in unchanged.items()}
    assert len(swept.cells) == LAYERS * len(clean)
    assert swept.started.columns == [str(position) for position in range(len(clean))]
    for cell in swept.cells.values():
        around = range(max(0, cell.row - window // 2), min(LAYERS, cell.row + window // 2 + 1))
        changes = [
            change
            for layer in around
            for change in hooks(
                reference, source, Site(POINTS[point][1], layer), [(cell.column, cell.column)]
            )
        ]
        after = logprobs(reference, base, changes)
        difference = after[right] - after[wrong]
        recovered = (difference - differences["corrupt"]) / (
            differences["clean"] - differences["corrupt"]
        )
        rank = 1 + int((after > after[right] + 1e-3).sum())
        assert cell.values[0] == pytest.approx(after[right], abs=2e-3)
        assert cell.values[1] == pytest.approx(np.exp(after[right]), abs=1e-3)
        assert cell.values[2] == pytest.approx(difference, abs=2e-3)
        assert rank <= cell.values[3] <= 1 + int((after > after[right] - 1e-3).sum())
        assert cell.values[4] == pytest.approx(recovered, abs=2e-3)
        assert after[cell.top_token_id] == pytest.approx(after.max(), abs=2e-3)
    for number, name in enumerate(names[:3]):
        assert swept.summary.grades[number].noise.sample_count == 8, name
    assert swept.summary.grades[2].clean == pytest.approx(differences["clean"], abs=2e-3)
    assert swept.summary.grades[2].corrupt == pytest.approx(differences["corrupt"], abs=2e-3)
    assert not swept.summary.missing


@pytest.mark.parametrize("direction", ["DENOISE", "NOISE"])
@pytest.mark.parametrize(("point", "window"), [("resid_post", 1), ("attn_out", 1), ("mlp_out", 3)])
def test_every_cell_is_what_hooks_give(
    services: Services, reference: HfReference, direction: str, point: str, window: int
) -> None:
    assert_cells(services, reference, direction, point, window)
    assert not services.run_ids()


@pytest.mark.parametrize("direction", ["DENOISE", "NOISE"])
def test_divergences_and_probes_are_what_hooks_give(
    services: Services, reference: HfReference, direction: str
) -> None:
    clean, corrupt = services.tokens(CLEAN), services.tokens(CORRUPT)
    base, source = (corrupt, clean) if direction == "DENOISE" else (clean, corrupt)
    vector = np.random.default_rng(5).normal(size=128).astype(np.float32)
    read_at = Site(Point.RESID_POST, 4)

    def probe(pool: int, **settings: object) -> sweep_pb2.Grade:
        read = vector_pb2.Readout(**settings)
        read.vector.inline.CopyFrom(
            tensor_pb2.Tensor(
                dtype=tensor_pb2.DTYPE_FLOAT32,
                encoding=tensor_pb2.ENCODING_RAW,
                shape=[1, 128],
                inline=vector.tobytes(),
            )
        )
        message = gate_pb2.Probe(name="p", sites=sites("resid_post", layers=[4]), read=read)
        return sweep_pb2.Grade(probe=sweep_pb2.ProbeGrade(probe=message, pool=pool))

    swept = sweep(
        services,
        services.pair(answer=None, foil=None),
        sites=sites("resid_post", layers=[1, 4, LAYERS - 1]),
        direction=sweep_pb2.SweepDirection.Value(f"SWEEP_DIRECTION_{direction}"),
        grades=[
            grade("KL"),
            probe(gate_pb2.POOL_LAST),
            probe(gate_pb2.POOL_MEAN, normalise=vector_pb2.NORMALISE_COSINE),
            probe(gate_pb2.POOL_MAX, bias=-1.0, activation=vector_pb2.ACTIVATION_TANH),
        ],
    )
    target = logprobs(reference, clean, [])
    for cell in swept.cells.values():
        site = Site(Point.RESID_POST, (1, 4, LAYERS - 1)[cell.row])
        changes = hooks(reference, source, site, [(cell.column, cell.column)])
        after = reference.run(base, changes)
        logits = np.asarray(after.logprobs[-1], np.float64)
        rows = np.asarray(after.streams[read_at.index], np.float64)
        scores = rows @ vector.astype(np.float64)
        cosines = scores / np.linalg.norm(rows, axis=1) / np.linalg.norm(vector)
        assert cell.values[0] == pytest.approx((np.exp(target) * (target - logits)).sum(), abs=1e-3)
        assert cell.values[1] == pytest.approx(scores[-1], abs=2e-3)
        assert cell.values[2] == pytest.approx(cosines.mean(), abs=1e-4)
        assert cell.values[3] == pytest.approx(np.tanh(scores - 1).max(), abs=2e-3)
        assert logits[cell.top_token_id] == pytest.approx(logits.max(), abs=2e-3)
    spread = swept.grid(0).max() - swept.grid(0).min()
    assert spread > 0.1
    assert not services.run_ids()


def test_the_last_layers_last_row_restores_the_answer(services: Services) -> None:
    swept = sweep(services, grades=[grade("LOGPROB", recovered=True)])
    assert swept.grid()[-1, -1] == pytest.approx(1.0, abs=1e-4)
    assert swept.grid()[-1, :-1] == pytest.approx(0.0, abs=1e-4)
    assert [cell.below_noise for cell in swept.cells.values() if cell.row == LAYERS - 1] == [
        *[True] * (len(swept.started.columns) - 1),
        False,
    ]


def test_answers_of_several_tokens_and_alternatives(
    services: Services, reference: HfReference
) -> None:
    texts = (" Paris, the capital", " London", " Paris.")
    clean, corrupt = services.tokens(CLEAN), services.tokens(CORRUPT)
    swept = sweep(
        services,
        services.pair(answer=services.answer(*texts)),
        sites=sites("resid_post", layers=[1, 4]),
        where=positions((2, 4), (-1, len(clean))),
        grades=[grade("LOGPROB"), grade("LOGIT_DIFFERENCE")],
    )
    columns = [int(name) for name in swept.started.columns]
    assert columns == [2, 3, len(clean) - 1]
    for cell in swept.cells.values():
        layer, position = (1, 4)[cell.row], columns[cell.column]
        site = Site(Point.RESID_POST, layer)

        def joint(text: str, site: Site = site, position: int = position) -> float:
            answer = services.tokens(text, special=False)
            changes = hooks(reference, clean, site, [(position, position)])
            after = reference.run([*corrupt, *answer], changes).logprobs
            steps = range(len(corrupt) - 1, len(corrupt) - 1 + len(answer))
            return sum(float(after[s][t]) for s, t in zip(steps, answer, strict=True))

        want = np.logaddexp.reduce([joint(text) for text in texts])
        assert cell.values[0] == pytest.approx(want, abs=3e-3)
        assert cell.values[1] == pytest.approx(want - joint(WRONG), abs=3e-3)


def test_groups_of_pairs_with_other_lengths(services: Services, reference: HfReference) -> None:
    prompts = [(CLEAN, CORRUPT), (LONGER, LONGER.replace("Eiffel", "Willis"))]
    pairs, placed = [], []
    for clean, corrupt in prompts:
        end = len(services.tokens(clean))
        subject = services.tokens(clean).index(services.tokens(CLEAN)[2])
        groups = [(subject, subject + 1)], [(0, subject), (subject + 1, end - 1)], [(end - 1, end)]
        placed.append([[p for a, b in group for p in range(a, b)] for group in groups])
        pairs.append(
            services.pair(
                prompt=types_pb2.Prompt(text=clean),
                corrupt=types_pb2.Prompt(text=corrupt),
                groups=[positions(*group) for group in groups],
            )
        )
    swept = sweep(
        services,
        *pairs,
        group_labels=["subject", "others", "last"],
        sites=sites("resid_post", layers=[0, 3]),
        grades=[grade("LOGIT_DIFFERENCE")],
        pair_values=True,
        max_concurrent_cells=3,
    )
    (right,), (wrong,) = (services.tokens(text, special=False) for text in (RIGHT, WRONG))
    for row, column in product(range(2), range(3)):
        cell, values = swept.cells[3 * row + column], []
        for (clean, corrupt), where in zip(prompts, placed, strict=True):
            changes = hooks(
                reference,
                services.tokens(clean),
                Site(Point.RESID_POST, (0, 3)[row]),
                [(position, position) for position in where[column]],
            )
            after = logprobs(reference, services.tokens(corrupt), changes)
            values.append(after[right] - after[wrong])
        assert list(cell.pair_values) == pytest.approx(values, abs=2e-3)
        assert cell.values[0] == pytest.approx(np.mean(values), abs=2e-3)
        assert cell.standard_errors[0] == pytest.approx(np.std(values) / 1, abs=2e-3)


def test_zeros_and_means_ablate_the_clean_prompt(
    services: Services, engine: rheostat.Engine, reference: HfReference
) -> None:
    run = rheostat.Capture("mlp_out", "all", where="prompt", to=rheostat.Run("mean-of-it"))
    engine.generate(CORRUPT, capture=run, max_tokens=1, temperature=0)
    clean, corrupt = services.tokens(CLEAN), services.tokens(CORRUPT)
    (right,) = services.tokens(RIGHT, special=False)
    streams = reference.run(corrupt).streams
    for source, row_of in (
        ({"zeros": replace_pb2.ZeroSource()}, lambda site: torch.zeros(128)),
        (
            {"mean": replace_pb2.MeanSource(run_id="mean-of-it")},
            lambda site: torch.from_numpy(streams[site.index].mean(0)),
        ),
        (
            {
                "mean": replace_pb2.MeanSource(
                    run_id="mean-of-it", positions=replace_pb2.PositionList(positions=[2, -1])
                )
            },
            lambda site: torch.from_numpy(streams[site.index][[2, -1]].mean(0)),
        ),
    ):
        pair = services.pair(**source)
        swept = sweep(services, pair, sites=sites("mlp_out"), grades=[grade("LOGPROB")])
        assert not swept.summary.grades[0].HasField("corrupt")
        for cell in swept.cells.values():
            site = Site(Point.MLP_OUT, cell.row)
            row = row_of(site)
            change = Change(site.index, lambda x, row=row: row + 0 * x, [cell.column])
            after = logprobs(reference, clean, [change])
            assert cell.values[0] == pytest.approx(after[right], abs=2e-3)
    engine.delete_run("mean-of-it")


def test_a_run_stands_for_the_corrupt_prompt(services: Services, engine: rheostat.Engine) -> None:
    run = rheostat.Capture("resid_post", "all", where="prompt", to=rheostat.Run("corrupt"))
    engine.generate(CORRUPT, capture=run, max_tokens=1, temperature=0)
    noise = sweep_pb2.SWEEP_DIRECTION_NOISE
    for direction in (noise, sweep_pb2.SWEEP_DIRECTION_DENOISE):
        by_prompt = sweep(services, direction=direction)
        by_run = sweep(services, services.pair(run_id="corrupt"), direction=direction)
        np.testing.assert_allclose(by_run.grid(), by_prompt.grid(), atol=1e-4)
    narrow = sweep(
        services, services.pair(run_id="corrupt"), direction=noise, sites=sites("attn_out")
    )
    assert all("has no rows of attn_out" in cell.error.message for cell in narrow.cells.values())
    engine.delete_run("corrupt")


def test_alpha_lies_between_nothing_and_all(services: Services) -> None:
    grids = [
        sweep(services, alpha=alpha, sites=sites("resid_post", layers=[3])).grid()[0, -1]
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert sorted(grids) in (grids, grids[::-1])
    assert len(set(grids)) == len(grids)


def test_a_call_that_ended_early_is_taken_up_with_the_same_cells(services: Services) -> None:
    whole = sweep(services)
    call = services.sweeps.Sweep(
        pb.SweepRequest(
            pairs=[services.pair()],
            sites=sites("resid_post"),
            grades=[grade("LOGIT_DIFFERENCE")],
            max_concurrent_cells=2,
        )
    )
    have = {}
    for response in call:
        if response.HasField("cell"):
            have[response.cell.index] = response.cell
        if len(have) == 10:
            call.cancel()
            break
    done = [sweep_pb2.CellRun(start=index, count=1) for index in sorted(have)]
    rest = sweep(services, done=done)
    assert have.keys() | rest.cells.keys() == whole.cells.keys()
    assert not have.keys() & rest.cells.keys()
    for index, cell in {**have, **rest.cells}.items():
        assert cell.values[0] == pytest.approx(whole.cells[index].values[0], abs=1e-4)
    assert not services.run_ids()


def test_zoom_finds_the_largest_effect_with_fewer_cells(services: Services) -> None:
    whole = sweep(services)
    zoom = sweep_pb2.Zoom(
        layer_stride=5, column_stride=2, layer_radius=1, column_radius=1, peak_count=2
    )
    zoomed = sweep(services, zoom=zoom)
    assert len(zoomed.phases) == 1
    assert len(zoomed.cells) < len(whole.cells) / 2
    base = whole.summary.grades[0].noise.mean
    effects = np.abs(whole.grid() - base)
    assert zoomed.summary.grades[0].peak == int(effects.argmax())
    for index, cell in zoomed.cells.items():
        assert cell.values[0] == pytest.approx(whole.cells[index].values[0], abs=1e-4)


def test_runs_are_kept_if_asked_for(services: Services) -> None:
    request = pb.SweepRequest()
    request.keep_runs.FromSeconds(60)
    swept = sweep(services, keep_runs=request.keep_runs, sites=sites("resid_post", "mlp_out"))
    assert len(swept.summary.run_ids) == 2
    assert set(swept.summary.run_ids) == services.run_ids()
    for run_id in swept.summary.run_ids:
        services.runs.DeleteRun(run_service_pb2.DeleteRunRequest(run_id=run_id))


RANDOM_DIRECTION = rheostat.inline(
    np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)
)
STEERING_OPS = {
    "add": 0.1 * RANDOM_DIRECTION,
    "ablate": rheostat.ablate(RANDOM_DIRECTION),
    "clamp": rheostat.clamp(RANDOM_DIRECTION, min=-0.05, max=0.05),
}


@pytest.mark.parametrize("op", STEERING_OPS)
@pytest.mark.parametrize("point", ["resid_post", "attn_out", "mlp_out"])
def test_putting_a_prompts_own_rows_back_under_steering_changes_no_bit(
    engine: rheostat.Engine, point: str, op: str
) -> None:
    same = rheostat.Pair(CLEAN, corrupt=CLEAN, answer=RIGHT, foil=WRONG)
    options = {"points": point, "layers": [1, 2], "grades": "logit_difference", "watch": False}
    plain = engine.sweep(same, **options)
    steering = STEERING_OPS[op].at(points=point, layers=2)
    swept = engine.sweep(same, steering=steering, **options)
    assert swept.base() != plain.base()
    for one in (plain, swept):
        assert (one.array() == one.base()).all()
        assert not one.significant.any()


def test_a_background_patch_acts_in_all_runs(services: Services, reference: HfReference) -> None:
    patched = steering_pb2.Intervention(
        sites=sites("resid_post", layers=[1]),
        where=positions((3, 4)),
        replace=replace_pb2.Replace(zeros=replace_pb2.ZeroSource()),
    )
    background = Change(Site(Point.RESID_POST, 1).index, lambda x: 0 * x, [3])
    clean, corrupt = services.tokens(CLEAN), services.tokens(CORRUPT)
    (right,) = services.tokens(RIGHT, special=False)
    steering, grades = steering_pb2.Steering(interventions=[patched]), [grade("LOGPROB")]
    swept = sweep(services, grades=grades, steering=steering)
    streams = reference.run(clean, [background]).streams
    for cell in swept.cells.values():
        site = Site(Point.RESID_POST, cell.row).index
        row = torch.from_numpy(streams[site])[cell.column]
        patch = Change(site, lambda x, row=row: row + 0 * x, [cell.column])
        after = logprobs(reference, corrupt, [background, patch])
        assert cell.values[0] == pytest.approx(after[right], abs=2e-3)
    assert np.abs(swept.grid()[0] - sweep(services, grades=grades).grid()[0]).max() > 0.05


def test_prompts_that_grade_alike_have_nothing_to_recover(services: Services) -> None:
    same = services.pair(corrupt=types_pb2.Prompt(text=CLEAN))
    with pytest.raises(grpc.RpcError) as caught:
        sweep(services, same, grades=[grade("LOGPROB", recovered=True)])
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "they differ by no more than" in caught.value.details()
    assert not services.run_ids()


def test_the_clients_result_is_the_grid(services: Services, engine: rheostat.Engine) -> None:
    raw = sweep(services, grades=[grade("LOGIT_DIFFERENCE", recovered=True)])
    pair = rheostat.Pair(CLEAN, corrupt=CORRUPT, answer=RIGHT, foil=WRONG)
    told: list[tuple[int, int]] = []
    result = engine.sweep(
        pair, grades="recovered logit_difference", progress=lambda *counts: told.append(counts)
    )
    np.testing.assert_allclose(result.array(), raw.grid(), atol=1e-4)
    assert told[-1] == (raw.grid().size, raw.grid().size)
    assert result.tokens[-1] == " of"
    assert result.top(1)[0].site.point == "resid_post"
    assert not result.skipped


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_noise_on_a_subject_is_what_hooks_give(
    services: Services, engine: rheostat.Engine, reference: HfReference, direction: str
) -> None:
    """Cells are averaged over noises, whose rows follow from seed, site and position."""
    std, seed, count, subject = 0.02, 7, 3, (2, 3)
    noisy = rheostat.NoisyPrompt(
        rheostat.Noise(std=std, seed=seed), where=rheostat.positions(*subject), count=count
    )
    pair = rheostat.Pair(CLEAN, corrupt=noisy, answer=RIGHT)
    result = engine.sweep(
        pair, points="resid_post", layers=[1, 4], direction=direction, grades="logprob"
    )
    tokens = services.tokens(CLEAN)
    (right,) = services.tokens(RIGHT, special=False)
    want = np.zeros((2, len(tokens)))
    for number in range(count):
        drawn = [normal_row(seed + number, 0, position, 128) * std for position in subject]
        rows = [torch.from_numpy(row.astype(np.float32)) for row in drawn]
        noises = [
            Change(0, lambda x, row=row: x + row, [position])
            for position, row in zip(subject, rows, strict=True)
        ]
        base, source = (noises, []) if direction == "denoise" else ([], noises)
        for row, layer in enumerate((1, 4)):
            site = Site(Point.RESID_POST, layer).index
            stream = torch.from_numpy(reference.run(tokens, source).streams[site])
            for position in range(len(tokens)):
                patch = Change(site, lambda x, new=stream[position]: new + 0 * x, [position])
                after = logprobs(reference, tokens, [*base, patch])
                want[row, position] += after[right] / count
    np.testing.assert_allclose(result.array(), want, atol=3e-3)
    assert not result.skipped
