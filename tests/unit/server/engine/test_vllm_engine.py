"""What vLLM is told to take, and what a user is told when it doesn't come up."""

import itertools
import logging
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from vllm import platforms
from vllm.config import MultiModalConfig, VllmConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from rheostat_engine import EngineSettings
from rheostat_server.config import ServerConfig
from rheostat_server.engine import vllm_engine
from rheostat_server.engine.vllm_engine import (
    DEMO_MODEL,
    core_left_to_server,
    cpu_memory,
    graph_sizes,
    load_engine,
    make_config,
    step_arguments,
    what_happened,
)
from rheostat_server.errors import InvalidConfig

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
GIB = 1 << 30
MIB = 1 << 20


@dataclass
class Device:
    """What vLLM's defaults ask its platform about a GPU. All else is answered as on a CPU."""

    name: str
    memory: int

    def __getattr__(self, name: str) -> object:
        return getattr(current_platform, name)

    def is_cpu(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def get_device_total_memory(self) -> int:
        return self.memory

    def get_device_name(self) -> str:
        return self.name


DEVICES = {
    "cpu": None,
    "L4": Device("NVIDIA L4", 22 * GIB),
    "A100": Device("NVIDIA A100-SXM4-80GB", 80 * GIB),
    "H100": Device("NVIDIA H100 80GB HBM3", 79 * GIB),
    "H200": Device("NVIDIA H200", 140 * GIB),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device for which vLLM chooses its defaults."""
    fake = DEVICES[request.param]
    if fake is not None:
        monkeypatch.setattr(arg_utils, "current_platform", fake)
        monkeypatch.setattr(platforms, "current_platform", fake)
    return request.param


def started(device: str = "cpu", **fields: object) -> VllmConfig:
    """vLLM's configuration of a server."""
    config = ServerConfig(model="demo", port=0, kv_cache_memory_bytes=1 << 26, **fields)
    settings = EngineSettings("ipc:///tmp/none")
    kind: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
    return make_config(config, str(DEMO_MODEL), settings, kind, ())


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with much memory."""
    monkeypatch.setattr(vllm_engine, "available_memory", lambda: 1 << 50)


def buffers(config: VllmConfig) -> tuple[int, int]:
    """MiB of the ring and of the staging area in the settings of the workers."""
    settings = EngineSettings.from_config(config.additional_config)
    return settings.capture_bytes // MIB, settings.staging_bytes // MIB


def sizes(config: VllmConfig) -> tuple[int, int]:
    """The most tokens and the most samples of a step."""
    scheduler = config.scheduler_config
    return scheduler.max_num_batched_tokens, scheduler.max_num_seqs


def test_a_step_is_as_large_as_that_of_vllm_serve_but_not_larger_than_4096(device: str) -> None:
    theirs = AsyncEngineArgs(model=str(DEMO_MODEL), kv_cache_memory_bytes=1 << 26)
    tokens, samples = sizes(theirs.create_engine_config(UsageContext.OPENAI_API_SERVER))
    ours = started(device)
    assert sizes(ours) == (min(tokens, 4096), samples)
    if device in ("H100", "H200"):
        assert (tokens, samples, *buffers(ours)) == (8192, 1024, 1024, 2048)
    else:
        assert (tokens, *buffers(ours)) == (2048, 512, 1024)


def test_flags_take_precedence_over_the_defaults(device: str) -> None:
    config = started(device, max_num_batched_tokens=2048, max_num_seqs=64)
    assert (*sizes(config), *buffers(config)) == (2048, 64, 512, 1024)
    assert sizes(started(device, max_num_batched_tokens=8192))[0] == 8192
    config = started(device, capture_bytes=8 * MIB, staging_bytes=9 * MIB)
    assert buffers(config) == (8, 9)


@pytest.mark.parametrize("device", ["H200"], indirect=True)
def test_every_sample_has_a_token_in_a_step(device: str) -> None:
    assert sizes(started(device, max_num_seqs=5000)) == (5000, 5000)


@pytest.mark.parametrize("device", ["H200"], indirect=True)
@pytest.mark.parametrize("whole", ["prompts", "images"])
def test_a_step_that_computes_something_whole_is_as_large_as_vllms(device: str, whole: str) -> None:
    made = started(device, max_num_batched_tokens=8192)
    if whole == "prompts":
        made.scheduler_config.enable_chunked_prefill = False
    else:
        made.model_config.multimodal_config = MultiModalConfig()
    assert step_arguments(ServerConfig(model="demo"), made, "cuda") == {}


@pytest.mark.parametrize(
    ("asked", "tokens", "largest"),
    [(None, None, 4096), (None, 8192, 4096), (None, 600, 600), (512, None, 512), (2048, 600, 600)],
)
@pytest.mark.parametrize("device", ["H200"], indirect=True)
def test_steps_of_at_most_4096_tokens_run_as_cuda_graphs(
    device: str, asked: int | None, tokens: int | None, largest: int
) -> None:
    made = started(device, max_num_batched_tokens=tokens, max_num_seqs=256)
    made.compilation_config.cudagraph_capture_sizes = vllm_sizes(512)  # as on a GPU
    config = ServerConfig(
        model="demo", max_num_batched_tokens=tokens, max_cudagraph_capture_size=asked
    )
    chosen = step_arguments(config, made, "cuda")
    assert chosen == {"cudagraph_capture_sizes": graph_sizes(largest)}


@pytest.mark.parametrize("device", ["H200"], indirect=True)
@pytest.mark.parametrize("theirs", [[1, 2, 3], [*range(16, 1025, 16)]])
def test_larger_cuda_graphs_come_after_those_that_vllm_chose(
    device: str, theirs: list[int]
) -> None:
    made = started(device, max_num_seqs=256)
    made.compilation_config.cudagraph_capture_sizes = list(theirs)
    chosen = step_arguments(ServerConfig(model="demo"), made, "cuda")["cudagraph_capture_sizes"]
    larger = [size for size in graph_sizes(4096) if size > theirs[-1]]
    assert chosen == [*theirs, *larger]


def test_the_buffers_follow_from_the_step_that_was_chosen() -> None:
    config = started(max_num_batched_tokens=6144)
    assert (sizes(config)[0], *buffers(config)) == (6144, 1536, 3072)


def test_sizes_that_follow_from_a_step_must_fit_into_the_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_engine, "available_memory", lambda: 6 * GIB)
    with pytest.raises(InvalidConfig, match=r"6400 MiB .* only 6144 .* --staging-mib to 1408 or"):
        started(max_num_batched_tokens=8192)
    assert buffers(started(max_num_batched_tokens=6144)) == (1536, 3072)


def test_sizes_that_follow_from_a_step_must_fit_into_the_memory_of_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = Device("NVIDIA T400", 2 * GIB)
    monkeypatch.setattr(arg_utils, "current_platform", small)
    monkeypatch.setattr(platforms, "current_platform", small)
    with pytest.raises(InvalidConfig, match=r"takes 2432 MiB .* only 2048 MiB .* to 640 or"):
        started(device="cuda", max_num_batched_tokens=8192)


@pytest.mark.parametrize("runs", [1024, 1023])
def test_a_host_that_clients_may_fill_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: int
) -> None:
    monkeypatch.setattr(vllm_engine, "available_memory", lambda: (1792 + 6143) * MIB)
    with caplog.at_level(logging.WARNING, vllm_engine.__name__):
        started(max_num_batched_tokens=2048, runs_bytes=runs * MIB)
    warnings = [one.getMessage() for one in caplog.records if one.name == vllm_engine.__name__]
    assert [text.partition(" of host")[0] for text in warnings] == (
        ["clients may fill 6144 MiB"] if runs == 1024 else []
    )


def test_a_setting_that_cannot_be_used_is_no_failure_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise InvalidConfig("no room")

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr(vllm_engine, "_start", refuse)
    with pytest.raises(InvalidConfig, match=r"^no room$"):
        load_engine(ServerConfig(model="demo", port=0))


def test_a_size_that_was_given_holds_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = ServerConfig(model="toy", port=0, kv_cache_memory_bytes=1 << 20)
    monkeypatch.setenv(VARIABLE, "1")
    with caplog.at_level(logging.WARNING):
        assert cpu_memory(given) == {}
    assert VARIABLE not in os.environ
    assert VARIABLE in caplog.text


def test_the_environment_decides_where_nothing_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    open_end = ServerConfig(model="toy", port=0)
    monkeypatch.setenv(VARIABLE, "1")
    assert (cpu_memory(open_end), os.environ[VARIABLE]) == ({}, "1")
    monkeypatch.delenv(VARIABLE)
    assert 0 < cpu_memory(open_end)["kv_cache_memory_bytes"] <= 4 << 30


ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@pytest.mark.parametrize(
    ("backend", "device", "cores", "before", "threads"),
    [
        (ONE_PROCESS, "cpu", 2, None, "1"),
        (ONE_PROCESS, "cpu", 16, None, "15"),
        (ONE_PROCESS, "cpu", 1, None, "1"),
        (ONE_PROCESS, "cpu", 4, "4", "4"),
        (ONE_PROCESS, "cuda", 4, None, None),
        ("mp", "cpu", 4, None, None),
        (None, "cpu", 4, None, None),
    ],
)
def test_a_worker_in_the_process_of_the_engine_leaves_a_core_to_the_server(
    backend: str | None,
    device: str,
    cores: int,
    before: str | None,
    threads: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    config = ServerConfig(model="demo", distributed_executor_backend=backend)
    with core_left_to_server(config, device):
        assert os.environ.get("OMP_NUM_THREADS") == threads
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_the_engine_is_started_with_a_core_left_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Started(Exception):
        pass

    def start(_: object) -> None:
        raise Started(os.environ.get("OMP_NUM_THREADS"))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", start)
    made = SimpleNamespace(compilation_config=SimpleNamespace(mode=0))
    monkeypatch.setattr(vllm_engine, "make_config", lambda *_: made)
    config = ServerConfig(model="demo", distributed_executor_backend="uni.UniProcExecutor")
    with pytest.raises(Started, match=r"^3$"):
        vllm_engine._start(config, "", EngineSettings("ipc://nowhere"), "cpu", ())


@pytest.mark.parametrize("most", [1, 8, 256, 512])
def test_smaller_cuda_graphs_are_those_of_vllm(most: int) -> None:
    assert graph_sizes(most) == vllm_sizes(most)


@pytest.mark.parametrize("most", [3, 300, 500])
def test_the_largest_cuda_graph_has_the_size_that_was_given(most: int) -> None:
    assert graph_sizes(most) == [size for size in vllm_sizes(512) if size < most] + [most]


@pytest.mark.parametrize("most", [513, 600, 1024, 1100, 2048, 4096])
def test_larger_cuda_graphs_are_further_apart_than_those_of_vllm(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert [size for size in sizes if size <= 512] == vllm_sizes(512)
    larger = [512, *(size for size in sizes if size > 512)]
    for one, following in itertools.pairwise(larger):
        assert 0 < following - one <= (64 if following <= 1024 else 128)
    assert len(larger) <= 1 + 8 + (most - 512) // 128


def test_vllm_is_given_the_sizes_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    create = AsyncEngineArgs.create_engine_config

    def made_as_on_a_gpu(self: AsyncEngineArgs, context: UsageContext) -> VllmConfig:
        given.append(self.cudagraph_capture_sizes)
        made = create(self, context)
        made.compilation_config.cudagraph_capture_sizes = [1, 2]
        return made

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", made_as_on_a_gpu)
    started(max_num_batched_tokens=600, max_num_seqs=128, max_cudagraph_capture_size=550)
    assert given == [None, graph_sizes(550)]


def test_a_size_of_cuda_graphs_without_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rheostat_server")
    config = ServerConfig(model=str(DEMO_MODEL), max_cudagraph_capture_size=64)  # on a CPU
    make_config(config, config.model, EngineSettings("ipc://nowhere"), "cpu", ())
    said = [one.getMessage() for one in caplog.records if one.name.startswith("rheostat_server")]
    assert "--max-cudagraph-capture-size has no effect: there are no CUDA graphs" in said


def vllm_sizes(most: int) -> list[int]:
    """The sizes that vLLM chooses up to a largest one, on a device with many samples."""
    chosen = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=None,
            cudagraph_capture_sizes=None,
            max_cudagraph_capture_size=most,
            post_init_cudagraph_sizes=lambda: None,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=1024),
        performance_mode="balanced",
        speculative_config=None,
        uniform_decode_query_len=1,
    )
    VllmConfig._set_cudagraph_sizes(cast(Any, chosen))
    return chosen.compilation_config.cudagraph_capture_sizes


def test_a_validation_error_is_told_by_what_is_wrong_not_by_its_count() -> None:
    error = ValueError(
        "1 validation error for ModelConfig\n"
        "  Value error, max_model_len (999999) is greater than 2048 [type=value_error]\n"
        "    For further information visit https://errors.pydantic.dev"
    )
    assert what_happened(error).startswith(
        "Value error, max_model_len (999999) is greater than 2048"
    )


def test_other_errors_are_told_by_their_first_line_or_their_kind() -> None:
    assert what_happened(RuntimeError("no memory\nat all")) == "no memory"
    assert what_happened(KeyError()) == "KeyError"
