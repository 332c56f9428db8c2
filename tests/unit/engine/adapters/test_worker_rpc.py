"""What the server asks of a worker reaches its runtime, and the answers are plain data."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import VllmConfig

from rheostat_engine import Capacity, Capture, EngineSettings, ModelSites, Plan, Point, Released
from rheostat_engine.adapters.assembly import Assembled
from rheostat_engine.adapters.embedding import EmbeddingPart
from rheostat_engine.adapters.routers import Routers
from rheostat_engine.adapters.unembedding import FinalNorm, Unembedding
from rheostat_engine.adapters.worker_rpc import SiteRpc
from rheostat_engine.plan.plan import EncodedTable, Window, steering_of
from rheostat_engine.plan.tables import SteeringTable
from rheostat_engine.sites.block_layout import SiteError
from rheostat_engine.worker.steering import built_tables

from ..cpu_worker import NOTHING, Worker, stream_at
from ..strategies import EVERYWHERE, SITES, ablate, add
from ..tables import WIDTH, capacity

NEW = b"\x0a" * 32


VOCABULARY = 11


class ToyModel(nn.Module):
    """Its logits are rows times a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.T


def toy_unembedding() -> Unembedding:
    """A norm that divides by 2, and a head; without directions."""
    norm = FinalNorm(nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH), torch.zeros(WIDTH), centered=False)
    with torch.no_grad():
        norm.module.weight.copy_(0.5 * torch.eye(WIDTH))
        norm.module.bias.zero_()
    return Unembedding(
        ToyModel(), VllmConfig(), torch.float32, torch.device("cpu"), lambda: None, norm
    )


class Base:
    """Stands for vLLM's worker."""

    def __init__(self) -> None:
        self.stopped = 0
        self.problem: Exception | None = None

    def load_model(self, *, load_dummy_weights: bool) -> None:
        assert load_dummy_weights
        if self.problem is not None:
            raise self.problem

    def shutdown(self) -> None:
        self.stopped += 1


class Rpc(SiteRpc, Base):
    """A worker with sites."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        assembled = Assembled(
            worker.runtime,
            capacity(),
            {Point.RESID_MID.value: "parallel"},
            Routers({}, {}),
            {0: "pair", 1: "single"},
            (SITES - 1) // 2,
            toy_unembedding(),
            EmbeddingPart(count=4, total=0.0, squares=16.0),
        )
        model = SimpleNamespace(architecture="Toy")
        self.model_runner = SimpleNamespace(
            sites=assembled, vllm_config=SimpleNamespace(model_config=model)
        )


@pytest.mark.parametrize("folder", [True, False])
def test_a_worker_that_cannot_load_its_model_leaves_the_reason_beside_its_channel(
    tmp_path: Path, folder: bool
) -> None:
    rpc = Rpc(Worker())
    settings = EngineSettings(f"ipc://{tmp_path / ('' if folder else 'gone')}/events")
    rpc.vllm_config = SimpleNamespace(additional_config=settings)
    rpc.load_model(load_dummy_weights=True)
    assert not settings.failure_file.exists()
    rpc.problem = SiteError("no room")
    with pytest.raises(SiteError):
        rpc.load_model(load_dummy_weights=True)
    if folder:
        assert settings.failure_file.read_text() == "no room"


def test_a_worker_describes_its_model() -> None:
    described = Rpc(Worker()).rheostat_describe()
    assert ModelSites.from_reports([msgspec.json.decode(msgspec.json.encode(described))]) == (
        ModelSites(
            architecture="Toy",
            num_layers=2,
            width=WIDTH,
            dtype="float32",
            runner="V1",
            refused={Point.RESID_MID: "parallel"},
            capacity=Capacity(64, 64, 256, 64, 32, 1000),
            world_size=1,
            block_layouts={0: "pair", 1: "single"},
            variants=("active", "plain"),
            embedding_std=2.0,
        )
    )


def test_rows_are_read_with_the_models_norm_and_head() -> None:
    rpc = Rpc(Worker())
    rows = np.random.default_rng(0).normal(size=(3, WIDTH)).astype("<f4")
    answer = rpc.rheostat_lens(rows.tobytes(), 2, [4, 0], rows[1:2].tobytes())
    assert answer is not None
    logits = torch.from_numpy(rows) @ rpc._assembled.unembedding.model.weight.T / 2
    expected = torch.log_softmax(logits, -1)
    got = {name: np.frombuffer(data, "<f4") for name, data in answer.items()}
    ids = np.frombuffer(answer["top_ids"], "<i4").reshape(3, 2)
    ranks = np.frombuffer(answer["ranks"], "<i4").reshape(3, 2)
    best = expected.topk(2, -1)
    assert ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(got["top_logprobs"], best.values.flatten(), atol=1e-5)
    np.testing.assert_allclose(got["logprobs"], expected[:, [4, 0]].flatten(), atol=1e-5)
    assert ranks.tolist() == [
        [1 + int((row > row[token]).sum()) for token in (4, 0)] for row in expected
    ]
    np.testing.assert_allclose(got["log_normalizers"], logits.logsumexp(-1), atol=1e-5)
    np.testing.assert_allclose(got["scales"], 0.5, atol=1e-6)
    clean = expected[1]
    divergences = (clean.exp() * (clean - expected)).sum(-1)
    np.testing.assert_allclose(got["divergences"], divergences, atol=1e-5)
    assert rpc.rheostat_directions([4]) is None


def test_a_rank_without_a_head_reads_nothing() -> None:
    rpc = Rpc(Worker())
    stage = replace(rpc._assembled.unembedding, norm=None)
    rpc.model_runner.sites = replace(rpc._assembled, unembedding=stage)
    assert rpc.rheostat_lens(bytes(4 * WIDTH), 1, [], b"") is None
    assert rpc.rheostat_directions([1]) is None


def test_vectors_come_and_go_by_hexadecimal_digest() -> None:
    worker = Worker()
    rpc = Rpc(worker)
    values = np.arange(2 * WIDTH, dtype="<f4").reshape(2, WIDTH)
    rpc.rheostat_load_vectors({NEW.hex(): ([5.0, 6.0], values.tobytes())})
    worker.add_request("v", Plan("r", (add(1, digest=NEW),)))
    worker.step([("v", 0, 1)])
    assert worker.streams["v", 0, 1].tolist() == (stream_at("v", 0, 1) + values[0]).tolist()
    worker.finish("v")
    released = worker.row_sender.events[-1]
    assert isinstance(released, Released)
    assert [dose.change for dose in released.doses] == [5.0]
    rpc.rheostat_drop_vectors([NEW.hex()])
    worker.add_request("w", Plan("s", (add(2, digest=NEW),)))
    assert getattr(worker.row_sender.events[-1], "error", "") == (
        f"vector {NEW.hex()} is not in the worker"
    )


def test_an_update_says_where_it_begins_or_why_it_does_not() -> None:
    worker = Worker()
    rpc = Rpc(worker)
    worker.add_request("v", Plan("r"))
    wire = Plan("r", (add(1),)).to_wire()
    unknown_site = Plan("r", (add(SITES),)).to_wire()
    assert rpc.rheostat_update_steering(
        [(wire, ["r", "nobody"], 3), (unknown_site, ["r"], 0), (wire, ["r"], 4)]
    ) == [
        [(3, ""), (-1, "")],
        [(0, f"the plan names a site that is not one of the model's {SITES}")],
        [(4, "")],
    ]


def test_plans_are_prepared_part_by_part_and_let_go_of() -> None:
    worker = Worker()
    rpc = Rpc(worker)
    one = Plan("r", tuple(add(1, scale=1.0 + n, where=((n, n + 1),)) for n in range(9)))
    other = Plan("s", (add(1, digest=NEW),))
    missing = f"vector {NEW.hex()} is not in the worker"
    assert rpc.rheostat_prepare("one", one.to_wire(), 5) == (False, "")
    assert rpc.rheostat_prepare("other", other.to_wire(), 5) == (True, missing)
    assert rpc.rheostat_prepare("one", None, 50) == (True, "")
    assert rpc.rheostat_stats()["slots_used"] == 9
    rpc.rheostat_release(["one", "other"])
    assert rpc.rheostat_stats()["slots_used"] == 0


def test_statistics_release_unused_tables_in_parts_and_say_whether_some_are_left() -> None:
    worker = Worker(capacity(slots=2000, bank_rows=2000))
    rpc = Rpc(worker)
    for number in range(4):
        spans = [((n, n + 1),) for n in range(300)]
        acts = [add(1, scale=1.0 + number + n / 999, where=where) for n, where in enumerate(spans)]
        plan = Plan("r", tuple(acts), measured=False, window=Window(0, 300, 0))
        worker.add_request("v", plan)
        worker.finish("v")
    found = [rpc.rheostat_stats() for _ in range(4)]
    left = [stats["slots_used"] for stats in found]
    assert 0 < left[0] < 1200
    assert left == sorted(left, reverse=True)
    assert [stats["unused_tables"] for stats in found] == [slots > 0 for slots in left]
    assert left[-1] == 0


def test_each_call_that_prepares_a_plan_does_a_bounded_part(monkeypatch) -> None:
    worker = Worker()
    rpc = Rpc(worker)
    tables: list[EncodedTable] = []

    def reading(acts: EncodedTable) -> SteeringTable:
        tables.append(acts)
        return steering_of(acts)

    monkeypatch.setattr(built_tables, "steering_of", reading)
    acts = tuple(add(*range(SITES), scale=1.0 + n, where=((n, n + 1),)) for n in range(24))
    captures = tuple(Capture((n,), ((n, 30 - n),)) for n in range(SITES))
    plan = Plan("r", acts, captures)
    done = []
    while not done or not done[-1]:
        before = worker.captures.sets.built, len(tables), worker.steering.built_tables.built
        complete, error = rpc.rheostat_prepare("one", plan.to_wire(), 2)
        assert error == ""
        done.append(complete)
        after = worker.captures.sets.built, len(tables), worker.steering.built_tables.built
        built, read, made = (late - early for early, late in zip(before, after, strict=True))
        # A table of captures is built at once, and a table of acts is read at once.
        assert bool(built) + bool(read) <= 1
        assert made <= (0 if built else SITES + 1)
    assert worker.captures.sets.built == plan.packed_captures.plan_cost
    assert len(tables) == 1
    assert len(done) > 5


@pytest.mark.parametrize(
    ("acts", "captures", "message"),
    [
        ((add(1),), (Capture((99,), EVERYWHERE),), "names a site that is not one"),
        ((add(99),), (Capture((1,), EVERYWHERE),), "names a site that is not one"),
        ((add(1, digest=NEW),), (Capture((1,), EVERYWHERE),), "is not in the worker"),
    ],
)
def test_a_plan_that_cannot_be_prepared_holds_nothing(acts, captures, message) -> None:
    worker = Worker()
    rpc = Rpc(worker)
    wire = Plan("r", acts, captures).to_wire()
    done, error = False, ""
    while not done:
        done, error = rpc.rheostat_prepare("one", wire, 1)
    assert message in error
    assert worker.held() == NOTHING
    assert not len(worker.runtime.preparations)


def test_statistics_say_what_is_in_use_and_what_has_been() -> None:
    worker = Worker()
    acts = (add(0), ablate(1), add(1, scale=2.0))
    worker.add_request("v", Plan("r", acts, (Capture((2,), EVERYWHERE),)))
    worker.step([("v", 0, 3)])
    worker.step([("w", 0, 3)])
    assert Rpc(worker).rheostat_stats() == {
        "bank_rows_used": 2,
        "directions_used": 1,
        "steps_used": 2,
        "slots_used": 1,
        "gates_used": 0,
        "gate_states_used": 0,
        "token_rules_used": 0,
        "unused_tables": False,
        "requests": 1,
        "captured_rows": 3,
        "lost_rows": 0,
        "left_bytes": 3 * 4 * WIDTH,
        "plain_rows": 0,
        "row_encodings_used": 0,
        "ring_bytes": 1001 * 4 * WIDTH,
        "encode_bytes": worker.row_sender.scratch,
        "staging_bytes": 1 << 20,
        "staging_skipped_bytes": 0,
        "pinned": False,
        "steps": {"plain": 1, "active": 1},
        "controllers": {},
        "own_graphs": 0,
        "held_graphs": 0,
    }


def test_a_worker_sends_its_last_rows_before_it_stops() -> None:
    rpc = Rpc(Worker())
    closed: list[int] = []
    rpc.model_runner.sites.runtime.close = lambda: closed.append(rpc.stopped)
    rpc.shutdown()
    assert (closed, rpc.stopped) == ([0], 1)


def test_a_worker_that_never_had_a_model_stops_too() -> None:
    rpc = Rpc(Worker())
    del rpc.model_runner
    rpc.shutdown()
    assert rpc.stopped == 1


def test_what_is_drawn_after_the_random_state_is_restored_is_what_would_have_been() -> None:
    rpc = Rpc(Worker())

    def draw() -> tuple[list[int], list[float]]:
        return np.random.randint(2**31, size=4).tolist(), torch.rand(4).tolist()

    rpc.rheostat_save_random_state()
    first = draw()
    assert draw() != first
    rpc.rheostat_restore_random_state()
    assert draw() == first
