"""Questions to the workers, with a stand-in for vLLM's engine."""

import asyncio
import inspect
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import SamplingParams, envs
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rheostat_engine import (
    EXTRA_ARG,
    OPEN_END,
    Act,
    EngineSettings,
    GainsUpdate,
    Kind,
    Plan,
    Window,
)
from rheostat_engine.plan.plan import read_plan
from rheostat_server.config import ServerConfig
from rheostat_server.engine import vllm_backend, vllm_engine, vllm_outputs, vllm_templates
from rheostat_server.engine.backend import Delta, Job, Start, SteeringUpdate
from rheostat_server.engine.loras import Lora
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.engine.vllm_backend import VllmBackend, answered, start_backend
from rheostat_server.engine.vllm_engine import LoadedEngine, QueueCounter
from rheostat_server.engine.vllm_templates import RequestTemplates
from rheostat_server.errors import Defect, EngineFailed, EngineLost
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import make_vector

from ..fakes import INFO, SITES
from ..streams import until


@dataclass
class Engine:
    """Answers once `answer` is set."""

    dead: bool = False
    looks: int = 0
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)

    @property
    def errored(self) -> bool:
        self.looks += 1
        return self.dead

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[int]:
        self.asked.append((method, args))
        await self.answer.wait()
        return [1, 2]


async def test_an_answer_is_passed_on() -> None:
    llm = Engine()
    llm.answer.set()
    backend = object.__new__(VllmBackend)
    backend._loaded = SimpleNamespace(llm=llm)
    assert await backend._call("count", 3) == [1, 2]
    assert llm.asked == [("count", (3,))]


async def test_a_slow_answer_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(vllm_backend, "_HEARTBEAT", 0.001)
    llm = Engine()
    asking = asyncio.create_task(answered(llm, llm.collective_rpc("count")))
    await until(lambda: llm.looks > 2)
    assert not asking.done()
    llm.answer.set()
    assert await asking == [1, 2]


async def test_a_dead_engine_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(vllm_backend, "_HEARTBEAT", 0.001)
    llm = Engine(dead=True)
    with pytest.raises(EngineLost):
        await answered(llm, llm.collective_rpc("count"))


async def test_an_engine_whose_channel_cannot_be_bound_is_ended(monkeypatch, tmp_path) -> None:
    class Ended(Engine):
        ended = False

        def shutdown(self, timeout: float) -> None:
            self.ended = True

    llm = Ended()
    llm.answer.set()
    settings = EngineSettings(f"ipc://{tmp_path}/{'x' * 200}/events", 1, 1)
    loaded = LoadedEngine(llm, settings, QueueCounter(), "cpu", {})
    monkeypatch.setattr(vllm_backend, "load_engine", lambda config: loaded)
    monkeypatch.setattr(
        vllm_backend, "ModelSites", SimpleNamespace(from_reports=lambda reports: SITES)
    )
    monkeypatch.setattr(vllm_backend, "_model_info", lambda config, loaded: INFO)
    with pytest.raises(EngineFailed):
        await start_backend(ServerConfig(model="demo"))
    assert llm.ended


async def test_an_engine_that_is_ending_is_not_lost(monkeypatch, tmp_path) -> None:
    """vLLM calls it errored from that moment on, so that it answers no question any more."""

    class Ends(Engine):
        tokenizer = output_handler = None

        def shutdown(self, timeout: float) -> None:
            self.dead = True
            asked.wait(10)

    asked, lost = threading.Event(), []
    llm, settings = Ends(), EngineSettings(f"ipc://{tmp_path}/events")
    monkeypatch.setattr(vllm_backend, "_HEARTBEAT", 0.001)
    monkeypatch.setattr(vllm_backend, "_model_info", lambda config, loaded: INFO)
    loaded = LoadedEngine(llm, settings, QueueCounter(), "cpu", {})
    backend = vllm_backend.VllmBackend(ServerConfig(model="demo"), loaded, SITES)
    backend.start(lambda event: None, lost.append)
    closing = asyncio.create_task(backend.close())
    await until(lambda: llm.dead)
    with pytest.raises(EngineLost):
        await backend.worker_stats()
    asked.set()
    await closing
    assert lost == []


async def test_an_engine_has_more_time_to_end_than_it_gives_its_workers(
    monkeypatch, tmp_path
) -> None:
    """Otherwise vLLM would kill it, and it would leave its shared memory."""

    class Ends(Engine):
        tokenizer = output_handler = None

        def shutdown(self, timeout: float) -> None:
            self.timeout = timeout

    llm = Ends()
    monkeypatch.setattr(vllm_backend, "_model_info", lambda config, loaded: INFO)
    loaded = LoadedEngine(
        llm, EngineSettings(f"ipc://{tmp_path}/events"), QueueCounter(), "cpu", {}
    )
    await vllm_backend.VllmBackend(ServerConfig(model="demo"), loaded, SITES).close()
    patience = inspect.getsource(MultiprocExecutor._ensure_worker_termination)
    assert "timeout=envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS" in patience
    assert "wait_for_termination(active_procs(), 4)" in patience
    assert llm.timeout > 2 * (envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS + 4)


async def test_gains_for_a_dead_engine_fail_as_its_loss(monkeypatch, tmp_path) -> None:
    """vLLM refuses the message at once, so that there is nothing to wait for."""

    class Refuses(Engine):
        tokenizer = output_handler = None

        async def call_utility_async(self, *_: object) -> None:
            raise EngineDeadError

        def shutdown(self, timeout: float) -> None:
            pass

    llm, lost = Refuses(dead=True), []
    llm.engine_core = llm
    settings = EngineSettings(f"ipc://{tmp_path}/events", 1, 1)
    monkeypatch.setattr(vllm_backend, "_model_info", lambda config, loaded: INFO)
    loaded = LoadedEngine(llm, settings, QueueCounter(), "cpu", {})
    backend = VllmBackend(ServerConfig(model="demo"), loaded, SITES)
    monkeypatch.setattr(backend, "_lost", lost.append)
    with pytest.raises(EngineLost):
        await backend.set_gains([GainsUpdate("r", 1, 0, {0: 0.5})])
    assert len(lost) == 1
    await backend.close()


@pytest.fixture
def lora_request(monkeypatch) -> None:
    """Stands in for vLLM's class."""
    module = SimpleNamespace(LoRARequest=lambda *fields: fields)
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("lora_request")
async def test_every_adapter_is_loaded_before_the_engine_serves(monkeypatch, tmp_path) -> None:
    class Loads(Engine):
        async def add_lora(self, lora: object) -> bool:
            self.asked.append(("add_lora", lora))
            return True

        async def collective_rpc(self, method: str) -> list[object]:
            raise EngineLost("the end of this test")

    llm = Loads()
    llm.shutdown = lambda timeout: None
    loras = {name: Lora(name, number, f"/{name}", 8) for number, name in enumerate("ab", 1)}
    settings = EngineSettings(f"ipc://{tmp_path}/made/events")
    loaded = LoadedEngine(llm, settings, QueueCounter(), "cpu", loras)
    monkeypatch.setattr(vllm_backend, "load_engine", lambda config: loaded)
    with pytest.raises(EngineFailed, match="the end of this test"):
        await start_backend(ServerConfig(model="demo"))
    assert llm.asked == [("add_lora", ("a", 1, "/a")), ("add_lora", ("b", 2, "/b"))]


@pytest.mark.usefixtures("lora_request")
async def test_an_adapter_that_cannot_be_loaded_ends_the_start_by_name(
    monkeypatch, tmp_path
) -> None:
    class Refuses(Engine):
        tokenizer = None

        ended = False

        async def add_lora(self, lora: object) -> bool:
            raise Exception("Call to add_lora method failed: no weights\nat all")

        def shutdown(self, timeout: float) -> None:
            self.ended = True

    llm, folder = Refuses(), tmp_path / "made"
    folder.mkdir()
    settings = EngineSettings(f"ipc://{folder}/events")
    loras = {"odd": Lora("odd", 1, "/some/folder", 8)}
    loaded = LoadedEngine(llm, settings, QueueCounter(), "cpu", loras)
    monkeypatch.setattr(vllm_backend, "load_engine", lambda config: loaded)
    with pytest.raises(EngineFailed) as caught:
        await start_backend(ServerConfig(model="demo"))
    assert str(caught.value) == (
        "vLLM cannot load the adapter odd from /some/folder: Call to add_lora method failed: no "
        "weights. Repair it, or start without it"
    )
    assert (llm.ended, folder.exists()) == (True, False)


@pytest.mark.usefixtures("lora_request")
async def test_an_engine_that_dies_of_an_adapter_is_not_waited_for(monkeypatch) -> None:
    class Dies(Engine):
        async def add_lora(self, lora: object) -> bool:
            await self.answer.wait()
            return True

    monkeypatch.setattr(vllm_backend, "_HEARTBEAT", 0.001)
    with pytest.raises(EngineFailed, match="cannot load the adapter odd from /odd: the engine or"):
        await vllm_backend.load_lora(Dies(dead=True), Lora("odd", 1, "/odd", 8))


@pytest.mark.parametrize("reason", ["", "the ring does not fit"])
def test_an_engine_that_does_not_come_up_leaves_a_reason_but_no_folder(
    monkeypatch, tmp_path, reason: str
) -> None:
    def fail(config, path, settings, device, loras) -> None:
        made.extend(tmp_path.glob("rheostat-*"))
        if reason:
            settings.failure_file.write_text(reason)
        raise RuntimeError("see the log")

    made = []
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(vllm_engine.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(vllm_engine, "_start", fail)
    with pytest.raises(RuntimeError, match=reason or "see the log"):
        vllm_engine._load(ServerConfig(model="demo"), "demo", ())
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []


def reader_of(job, receive, fail, turns: vllm_outputs.OutputTurns | None = None):
    return vllm_outputs.DeltaReader(job, str, turns or vllm_outputs.OutputTurns(), receive, fail)


@pytest.mark.parametrize(("entries", "off_the_loop"), [(1000, False), (1001, True)])
async def test_many_prompt_logprobs_are_written_off_the_loop(
    monkeypatch, entries: int, off_the_loop: bool
) -> None:
    threads = []

    def delta(job, output, text_of) -> Delta:
        threads.append(threading.get_ident())
        return Delta(text="x")

    monkeypatch.setattr(vllm_outputs, "_delta", delta)
    deltas, errors = [], []
    job = SimpleNamespace(sampling=SimpleNamespace(prompt_logprobs=1, logprobs=None))
    outputs = reader_of(job, deltas.append, errors.append)
    outputs.put(SimpleNamespace(prompt_logprobs=[None] * entries))
    await until(lambda: bool(deltas))
    assert (deltas, errors) == ([Delta(text="x")], [])
    assert (threads != [threading.get_ident()]) == off_the_loop


@dataclass
class Output:
    """An output, as far as `DeltaReader` looks at it."""

    text: str
    prompt_logprobs: list[None] | None = None


async def test_outputs_wait_for_the_log_probabilities_before_them(monkeypatch) -> None:
    def delta(job, output: Output, text_of) -> Delta:
        if output.prompt_logprobs:
            written.wait(10)
        return Delta(text=output.text)

    written = threading.Event()
    monkeypatch.setattr(vllm_outputs, "_delta", delta)
    deltas: list[Delta] = []
    job = SimpleNamespace(sampling=SimpleNamespace(prompt_logprobs=1, logprobs=None))
    reader = reader_of(job, deltas.append, print)
    reader.put(Output("a", [None] * 5000))
    reader.put(Output("b"))
    await asyncio.sleep(0.01)
    reader.put(Output("c"))
    assert deltas == []
    written.set()
    await until(lambda: len(deltas) == 3)
    reader.put(Output("d"))
    assert [one.text for one in deltas] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("entries", [1, 5000])
async def test_an_output_that_cannot_be_read_fails_its_sample(monkeypatch, entries: int) -> None:
    def delta(job, output: Output, text_of) -> Delta:
        raise Defect("the engine gave the request up")

    monkeypatch.setattr(vllm_outputs, "_delta", delta)
    errors: list[Exception] = []
    job = SimpleNamespace(sampling=SimpleNamespace(prompt_logprobs=1, logprobs=None))
    reader = reader_of(job, print, errors.append)
    try:
        reader.put(Output("a", [None] * entries))
    except Defect as error:
        errors.append(error)
    await until(lambda: bool(errors))
    assert [str(one) for one in errors] == ["the engine gave the request up"]


@dataclass
class Ticks:
    """Counts iterations of the event loop."""

    count: int = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_log_probabilities_of_many_samples_are_read_in_several_iterations(
    monkeypatch,
) -> None:
    """Each sample gets its deltas in order, also those without log-probabilities."""
    monkeypatch.setattr(vllm_outputs, "_delta", lambda job, output, text_of: output.text)
    ticks, read = Ticks(), []
    ticking = asyncio.ensure_future(ticks.run())
    await asyncio.sleep(0)
    turns = vllm_outputs.OutputTurns()
    job = SimpleNamespace(sampling=SimpleNamespace(prompt_logprobs=None, logprobs=20))
    readers = [
        reader_of(job, lambda delta, n=n: read.append((ticks.count, n, delta)), print, turns)
        for n in range(64)
    ]
    for text, tokens in (("a", [1]), ("b", [1, 2]), ("c", [])):
        for reader in readers:
            output = SimpleNamespace(prompt_logprobs=None, text=text, token_ids=tokens)
            reader.put(output)
    await until(lambda: len(read) == 3 * 64)
    ticking.cancel()
    entries = Counter()
    for tick, _, text in read:
        entries[tick] += 21 * {"a": 1, "b": 2, "c": 0}[text]
    assert sum(entries.values()) == 64 * 3 * 21
    assert max(entries.values()) < 64 * 21
    for n in range(64):
        assert [text for _, other, text in read if other == n] == ["a", "b", "c"]


async def test_however_many_log_probabilities_wait_few_iterations_read_them(monkeypatch) -> None:
    ticks, turns = Ticks(), vllm_outputs.OutputTurns()
    ticking = asyncio.ensure_future(ticks.run())
    read: list[int] = []
    assert turns.take(vllm_outputs._TURN_ENTRIES)
    for number in range(1000):
        assert not turns.take(1)
        turns.wait(vllm_outputs._TURN_ENTRIES, lambda number=number: read.append(number))
    await until(lambda: len(read) == 1000)
    ticking.cancel()
    assert read == list(range(1000))
    assert ticks.count < 40


async def test_an_output_that_cannot_be_read_in_its_turn_fails_its_sample_alone(
    monkeypatch,
) -> None:
    def delta(job, output, text_of) -> str:
        if output.text == "bad":
            raise Defect("the engine gave the request up")
        return output.text

    monkeypatch.setattr(vllm_outputs, "_delta", delta)
    monkeypatch.setattr(vllm_outputs, "_TURN_ENTRIES", 1)
    deltas, errors, turns = [], [], vllm_outputs.OutputTurns()
    job = SimpleNamespace(sampling=SimpleNamespace(prompt_logprobs=None, logprobs=1))
    for text in ("a", "bad", "b"):
        output = SimpleNamespace(prompt_logprobs=None, text=text, token_ids=[1])
        reader_of(job, deltas.append, errors.append, turns).put(output)
    await until(lambda: len(deltas) == 2)
    assert (deltas, len(errors)) == (["a", "b"], 1)


def test_the_text_of_a_token_is_decoded_once() -> None:
    decoded = []

    class Letters:
        def decode(self, ids: list[int]) -> str:
            decoded.append(ids)
            return chr(ids[0])

    texts = vllm_outputs.token_texts(Letters())
    assert [texts(97), texts(98), texts(97)] == ["a", "b", "a"]
    assert decoded == [[97], [98]]
    assert vllm_outputs.token_texts(None)(97) == ""


def backend_with(answers: list[object]) -> tuple[vllm_backend.VllmBackend, list[object]]:
    """A backend whose workers answer so, and what they are asked."""
    asked: list[object] = []

    async def call(method: str, *args: object) -> object:
        asked.append((method, *args))
        return answers

    backend = object.__new__(vllm_backend.VllmBackend)
    backend._call = call
    return backend, asked


ACT = Act(Kind.NORM_ADD, (bytes(32),), ((4, (0,)),), ((0, OPEN_END),), scale=0.5)


@pytest.mark.parametrize("workers", [1, 2])
async def test_updates_reach_every_worker_in_one_call(workers) -> None:
    backend, asked = backend_with([[[(7, ""), (-1, "")], [(0, "")]]] * workers)
    one, other = Plan("", (ACT,)), Plan("", (replace(ACT, scale=2.0),))
    updates = [SteeringUpdate(one, ("r#0@1", "r#1@1"), 5), SteeringUpdate(other, ("s#0@2",), 0)]
    assert await backend.update_steering(updates) == [[7, None], [0]]
    sent = [(one.to_wire(), ["r#0@1", "r#1@1"], 5), (other.to_wire(), ["s#0@2"], 0)]
    assert asked == [("rheostat_update_steering", sent)]


@pytest.mark.parametrize(
    ("second", "words"), [((-1, "no vector"), "no vector"), ((8, ""), "different positions")]
)
async def test_an_update_that_the_workers_do_not_install_alike_fails_alone(second, words) -> None:
    backend, _ = backend_with([[[(7, "")], [(3, "")]], [[second], [(3, "")]]])
    updates = [SteeringUpdate(Plan("", (ACT,)), (name,), 5) for name in "rs"]
    failed, applied = await backend.update_steering(updates)
    assert isinstance(failed, Defect)
    assert words in str(failed)
    assert applied == [3]


async def test_vectors_reach_every_worker_as_float32_with_the_norms_of_their_rows() -> None:
    rows = np.array([[3.0, 4.0], [0.0, -2.0]])
    wide = make_vector(FloatType.FLOAT32, 2, 2, rows.astype("<f4").tobytes(), "v")
    narrow = make_vector(FloatType.FLOAT16, 2, 2, rows.astype("<f2").tobytes(), "v")
    backend, asked = backend_with([])
    await backend.load_vectors([wide, narrow])
    sent = ((5.0, 2.0), rows.astype("<f4").tobytes())
    told = {wide.digest.hex(): sent, narrow.digest.hex(): sent}
    assert asked == [("rheostat_load_vectors", told)]


def job(plan_id: str, sample: int = 0, acts: tuple[Act, ...] = (), **settings: object) -> Job:
    sampling = SamplingSettings(max_tokens=5, **settings)
    return Job(Plan(plan_id, acts), (1, 2), sampling, sample, "")


class Template(NamedTuple):
    """Stands in for `RequestTemplate`."""

    params: SamplingParams
    added: list[tuple[object, ...]]
    copies: list[list[tuple[str, Window]]]

    async def add(self, llm: object, *arguments: Any) -> list[None]:
        *own, copies = arguments
        self.added.append(tuple(own))
        self.copies.append(copies)
        return [None] * (1 + len(copies))


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A backend with stand-ins for templates; `made` lists them."""
    made: list[Template] = []

    def template(params: SamplingParams, lora: None, priority: int) -> Template:
        assert (lora, priority) == (None, 0)
        made.append(Template(params, [], []))
        return made[-1]

    monkeypatch.setattr(vllm_templates, "request_template", template)
    monkeypatch.setattr(vllm_backend, "receive_outputs", lambda *_: None)
    backend = object.__new__(VllmBackend)
    backend._loaded = SimpleNamespace(llm=None)
    backend._templates = RequestTemplates({}, has_tokenizer=False)
    backend._texts = backend._turns = None
    return SimpleNamespace(backend=backend, made=made)


async def test_equal_settings_share_a_template_and_each_sample_has_its_own_plan(adding) -> None:
    for one in (job("a", acts=(ACT,)), job("b", acts=(ACT,)), job("c")):
        await adding.backend.add_requests([Start(one, list, list)])
    (template,) = adding.made
    names = [name for name, _, _, _ in template.added]
    (first, second, third) = [extra for _, _, _, extra in template.added]
    assert names == ["a", "b", "c"]
    assert read_plan(first[EXTRA_ARG]).request_id == "a"
    assert read_plan(second[EXTRA_ARG]).request_id == "b"
    assert third is None


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("has_tokenizer", [False, True])
async def test_only_samples_whose_text_is_read_are_decoded(
    adding, has_tokenizer: bool, text: bool
) -> None:
    adding.backend._templates = RequestTemplates({}, has_tokenizer=has_tokenizer)
    await adding.backend.add_requests([Start(job("a", text=text), list, list)])
    assert adding.made[0].params.detokenize is (text and has_tokenizer)


async def test_each_sample_has_its_own_seed_and_only_the_first_the_prompts_log_probabilities(
    adding,
) -> None:
    settings = {"seed": 11, "samples": 3, "prompt_logprobs": 1}
    for sample in range(3):
        await adding.backend.add_requests([Start(job("a", sample, **settings), list, list)])
    assert [one.params.prompt_logprobs for one in adding.made] == [1, None]
    assert [seed for one in adding.made for _, _, seed, _ in one.added] == [11, 12, 13]


async def test_at_most_256_templates_are_kept(adding) -> None:
    for number in range(300):
        await adding.backend.add_requests([Start(job("a", top_k=number), list, list)])
    await adding.backend.add_requests([Start(job("a", top_k=300 - 256), list, list)])
    assert len(adding.made) == 300
    await adding.backend.add_requests([Start(job("a", top_k=300 - 257), list, list)])
    assert len(adding.made) == 301


async def test_requests_with_any_seed_share_a_template(adding) -> None:
    for seed in (7, None, 8):
        await adding.backend.add_requests([Start(job("a", seed=seed), list, list)])
    assert [[seed for _, _, seed, _ in one.added] for one in adding.made] == [[7, 8], [None]]


async def test_samples_that_differ_in_their_windows_are_added_with_one_message(adding) -> None:
    plan = Plan("", (ACT,), measured=False, window=Window(0, 1, 0)).pack()
    sampling = replace(job("a").sampling, samples=3)
    windows = [Window(at, at + 1, 0) for at in range(3)]
    starts = [
        Start(Job(plan.for_request(f"r{at}", 0, window), (1, 2), sampling, at, ""), list, list)
        for at, window in enumerate(windows)
    ]
    await adding.backend.add_requests(starts)
    (template,) = adding.made
    ((name, _, _, extra),) = template.added
    assert (name, read_plan(extra[EXTRA_ARG]).window) == ("r0", windows[0])
    assert template.copies == [[("r1", windows[1]), ("r2", windows[2])]]


async def test_samples_without_windows_are_added_one_by_one(adding) -> None:
    samples = [job("a", sample, samples=2) for sample in range(2)]
    await adding.backend.add_requests([Start(sample, list, list) for sample in samples])
    (template,) = adding.made
    assert (len(template.added), template.copies) == (2, [[], []])
