"""Where the adapters touch vLLM, vLLM still is what they expect; each test names who relies on it.

The only tests of this folder that import vLLM.
"""

import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import SamplingParams
from vllm.compilation import cuda_graph
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_input_batch import InputBatch as InputBatchV1
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from rheostat_engine import EXTRA_ARG, EngineSettings
from rheostat_engine.adapters.blocks import find_blocks
from rheostat_engine.adapters.refusals import refuse_unserved
from rheostat_engine.adapters.runner import server_request_id
from rheostat_engine.sites.block_layout import Block, SiteError


def parameters(function: Callable[..., object]) -> list[str]:
    """The names of a function's parameters; starred ones with their stars."""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return [
        stars.get(parameter.kind.name, "") + name
        for name, parameter in inspect.signature(function).parameters.items()
    ]


@pytest.mark.parametrize(
    ("function", "expected", "module"),
    [
        (CPUModelRunner.load_model, ["self", "load_dummy_weights"], "runner_v1"),
        (
            CPUModelRunner.execute_model,
            ["self", "scheduler_output", "intermediate_tensors"],
            "runner_v1",
        ),
        (
            CPUModelRunner._model_forward,
            [
                "self",
                "input_ids",
                "positions",
                "intermediate_tensors",
                "inputs_embeds",
                "**model_kwargs",
            ],
            "runner_v1",
        ),
        (
            GPUModelRunnerV2.load_model,
            ["self", "load_dummy_weights", "*args", "model", "**kwargs"],
            "runner_v2",
        ),
        (GPUModelRunnerV2.capture_model, ["self", "profile_only"], "runner_v2"),
        (
            GPUModelRunnerV2.prepare_inputs,
            ["self", "scheduler_output", "batch_req_state", "batch_desc", "num_active_loras"],
            "runner_v2",
        ),
        (
            LoRAModelRunnerMixin._set_active_loras,
            [
                "self",
                "prompt_lora_mapping",
                "token_lora_mapping",
                "lora_requests",
                "mapping_type",
            ],
            "runner",
        ),
        (
            LogitsProcessor.forward,
            ["self", "lm_head", "hidden_states", "embedding_bias", "skip_gather"],
            "unembedding",
        ),
        (VocabParallelEmbedding.forward, ["self", "input_"], "unembedding"),
        (LlamaForCausalLM.compute_logits, ["self", "hidden_states"], "unembedding"),
        (Worker._make_model_runner, ["self"], "worker_cuda"),
        (CPUWorker.init_device, ["self"], "worker_cpu"),
        (CPUModelRunner.__init__, ["self", "vllm_config", "device"], "worker_cpu"),
        (GPUModelRunnerV2.__init__, ["self", "vllm_config", "device"], "worker_cuda"),
        (torch.cuda.CUDAGraph.__new__, ["cls", "keep_graph"], "graphs"),
        (torch.cuda.CUDAGraph.capture_end, ["self"], "graphs"),
        (torch.cuda.CUDAGraph.instantiate, ["self"], "graphs"),
        (torch.cuda.CUDAGraph.replay, ["self"], "graphs"),
        (torch.cuda.CUDAGraph.raw_cuda_graph, ["self"], "graphs"),
        (torch.cuda.CUDAGraph.raw_cuda_graph_exec, ["self"], "graphs"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__qualname__", ""),
)
def test_what_an_adapter_overrides_or_calls_takes_what_it_did(
    function: Callable[..., object], expected: list[str], module: str
) -> None:
    assert parameters(function) == expected, f"rheostat_engine.adapters.{module} relies on it"


def test_a_logits_processor_has_a_scale_and_a_cap() -> None:
    config = VllmConfig()
    with set_current_vllm_config(config):
        processor = LogitsProcessor(8, scale=2.0, soft_cap=3.0)
    assert (processor.scale, processor.soft_cap, processor.org_vocab_size) == (2.0, 3.0, 8), (
        "rheostat_engine.adapters.unembedding relies on it"
    )


def test_an_adapters_layer_holds_the_models_own() -> None:
    for kind in (LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA):
        assert "base_layer" in parameters(kind.__init__), (
            "rheostat_engine.adapters.unembedding relies on it"
        )


def test_the_second_runners_step_begins_with_what_its_adapter_passes_on() -> None:
    names = parameters(GPUModelRunnerV2.execute_model)
    assert names[:4] == ["self", "scheduler_output", "intermediate_tensors", "dummy_run"], (
        "rheostat_engine.adapters.runner_v2.GpuSiteRunner.execute_model relies on it"
    )


@pytest.mark.parametrize(
    ("kind", "names", "module"),
    [
        (
            InputBatch,
            {
                "req_ids",
                "num_computed_tokens_np",
                "num_scheduled_tokens",
                "num_tokens_after_padding",
                "input_ids",
            },
            "runner_v2",
        ),
        (
            SchedulerOutput,
            {
                "finished_req_ids",
                "preempted_req_ids",
                "scheduled_new_reqs",
                "num_scheduled_tokens",
                "total_num_scheduled_tokens",
            },
            "runner and runner_v1",
        ),
        (NewRequestData, {"req_id", "sampling_params"}, "runner"),
        (CompilationConfig, {"static_forward_context"}, "blocks"),
        (
            VllmConfig,
            {
                "additional_config",
                "cache_config",
                "compilation_config",
                "kv_transfer_config",
                "model_config",
                "parallel_config",
                "shutdown_timeout",
                "speculative_config",
            },
            "assembly, refusals and orphans",
        ),
        (CacheConfig, {"kv_sharing_fast_prefill"}, "refusals"),
        (
            ParallelConfig,
            {"use_ubatching", "data_parallel_size", "prefill_context_parallel_size", "rank"},
            "refusals and the runners",
        ),
    ],
)
def test_what_an_adapter_reads_has_the_fields_that_it_had(
    kind: type, names: set[str], module: str
) -> None:
    fields = {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
    assert names <= fields, f"rheostat_engine.adapters.{module} relies on {names - fields}"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("architecture", "worker_rpc"),
        ("get_hidden_size", "assembly"),
        ("get_vocab_size", "assembly"),
        ("get_total_num_hidden_layers", "blocks"),
        ("is_encoder_decoder", "refusals"),
        ("uses_mrope", "probing"),
        ("dtype", "assembly"),
    ],
)
def test_a_model_config_answers_what_an_adapter_asks(name: str, module: str) -> None:
    known = {*dir(ModelConfig), *ModelConfig.__annotations__}
    assert name in known, f"rheostat_engine.adapters.{module} relies on it"


@pytest.mark.parametrize(
    ("where", "text", "module"),
    [
        (ModelConfig, "self.runner_type =", "refusals"),
        (GPUModelRunnerV1.execute_model, "self._model_forward(", "runner_v1"),
        (GPUModelRunnerV1.__init__, "self.max_num_tokens =", "runner_v1"),
        (GPUModelRunnerV1.__init__, "self.input_ids = self._make_buffer(", "runner_v1"),
        (GPUModelRunnerV2.__init__, "self.max_num_tokens =", "runner_v2"),
        (InputBatchV1, "self.num_computed_tokens_cpu =", "runner_v1"),
        (InputBatchV1, "def num_reqs(", "runner_v1"),
        (InputBatchV1, "def req_ids(", "runner_v1"),
        (GPUModelRunnerV2.execute_model, "self.prepare_inputs(", "runner_v2"),
        (GPUModelRunnerV2.load_model, "self.model_state = ", "runner_v2"),
        (Worker, "= self._make_model_runner()", "worker_cuda"),
        (Worker, "self.use_v2_model_runner =", "worker_cuda"),
        (CPUWorker.init_device, "self.model_runner", "worker_cpu"),
        (cudagraph_utils, "torch.cuda.CUDAGraph()", "graphs"),
        (cuda_graph, "torch.cuda.CUDAGraph()", "graphs"),
    ],
)
def test_vllm_still_does_by_name_what_an_adapter_hooks_into(
    where: object, text: str, module: str
) -> None:
    source = inspect.getsource(where)  # type: ignore[arg-type]  # functions, classes, modules
    assert text in source, f"rheostat_engine.adapters.{module} relies on it"


def test_dummy_batches_of_the_second_runner_prepare_no_inputs() -> None:
    source = inspect.getsource(GPUModelRunnerV2.execute_model)
    before = source[: source.index("self.prepare_inputs(")]
    guard = before.rindex("if not dummy_run:")
    assert "else:" not in before[guard:], "rheostat_engine.adapters.runner_v2 relies on it"


def test_the_second_runner_prepares_the_inputs_of_the_models_state_last() -> None:
    source = inspect.getsource(GPUModelRunnerV2.execute_model)
    calls = [
        "self.prepare_inputs(",
        "self.prepare_attn(",
        "self.model_state.prepare_attn(",
        "self.model_state.prepare_inputs(",
        "self.cudagraph_manager.run_fullgraph(",
        "self.cudagraph_manager.run_pw_graph(",
        "self.model(**model_inputs)",
    ]
    places = [source.index(call) for call in calls]
    assert places == sorted(places), "rheostat_engine.adapters.runner_v2 relies on it"
    assert source.count("self.model_state.prepare_inputs(") == 1
    assert parameters(DefaultModelState.prepare_inputs) == ["self", "input_batch", "req_states"]


def test_a_forward_pass_can_skip_what_is_compiled() -> None:
    assert "skip_compiled" in parameters(set_forward_context), (
        "rheostat_engine.adapters.probing relies on it"
    )


def test_sampling_parameters_carry_a_plan() -> None:
    params = SamplingParams(extra_args={EXTRA_ARG: {"id": "r"}})
    assert params.extra_args == {EXTRA_ARG: {"id": "r"}}


@pytest.mark.parametrize(("wanted", "skips"), [(None, False), (0, True), (5, True)])
def test_log_probabilities_of_a_prompt_alone_forgo_the_cache(
    wanted: int | None, skips: bool
) -> None:
    params = SamplingParams(prompt_logprobs=wanted)
    assert params.skip_reading_prefix_cache is skips, (
        "rheostat_server.engine.vllm_backend relies on it"
    )


def test_our_settings_enter_vllms_compile_hash() -> None:
    configs: list[Any] = [  # vLLM's type is dict or one with compute_hash
        {},
        EngineSettings("ipc:///a", bank_bytes=1),
        EngineSettings("ipc:///b", bank_bytes=2),
    ]
    hashes = {VllmConfig(additional_config=config).compute_hash() for config in configs}
    assert len(hashes) == 2, "rheostat_engine.settings relies on it"


def test_how_many_tokens_a_step_has_enters_vllms_compile_hash() -> None:
    hashes = {
        SchedulerConfig.default_factory(max_num_batched_tokens=tokens).compute_hash()
        for tokens in (2048, 4096)
    }
    assert len(hashes) == 2, "rheostat_engine.settings relies on it"


SERVED = {
    "speculative_config": None,
    "kv_transfer_config": None,
    "model_config": SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
    "parallel_config": SimpleNamespace(
        use_ubatching=False, data_parallel_size=1, prefill_context_parallel_size=1
    ),
    "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
}


def changed(part: str, **values: object) -> Any:  # in place of a VllmConfig
    """A configuration that is served but for one thing."""
    return SimpleNamespace(**{**SERVED, part: SimpleNamespace(**{**vars(SERVED[part]), **values})})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            SimpleNamespace(**{**SERVED, "speculative_config": object()}),
            "speculative decoding: serve without speculative_config",
        ),
        (
            changed("model_config", runner_type="pooling"),
            "pooling models: serve a generative model",
        ),
        (
            changed("model_config", is_encoder_decoder=True),
            "encoder-decoder models: serve a decoder-only model",
        ),
        (
            changed("parallel_config", use_ubatching=True),
            "dual-batch overlap: serve with enable_dbo=False",
        ),
        (
            changed("parallel_config", data_parallel_size=2),
            "data parallelism: start one server for each replica",
        ),
        (
            changed("parallel_config", prefill_context_parallel_size=2),
            "prefill context parallelism: serve with prefill_context_parallel_size=1",
        ),
        (
            changed("cache_config", kv_sharing_fast_prefill=True),
            "fast prefill over shared KV: serve with kv_sharing_fast_prefill=False",
        ),
        (
            SimpleNamespace(**{**SERVED, "kv_transfer_config": object()}),
            "KV connectors: serve without kv_transfer_config",
        ),
    ],
)
def test_a_configuration_that_moves_rows_is_refused_by_name(
    config: Any,  # in place of a VllmConfig
    reason: str,
) -> None:
    served: Any = SimpleNamespace(**SERVED)
    refuse_unserved(served)
    with pytest.raises(SiteError, match=f"^rheostat does not serve {reason}$"):
        refuse_unserved(config)


class Attention(nn.Module, AttentionLayerBase):
    """A layer with state."""

    def get_attn_backend(self) -> type:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        raise NotImplementedError


class Layer(nn.Module):
    """A block, or part of a model without state."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def registered(model: nn.Module) -> Any:  # in place of a VllmConfig
    """A configuration that knows a model's layers with state, and something that is none."""
    stateful = {n: m for n, m in model.named_modules() if isinstance(m, Attention)}
    context = {**stateful, "other": object()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))


def test_blocks_are_the_children_of_a_list_that_hold_layers_with_state() -> None:
    attention = [Attention() for _ in range(4)]
    model = nn.Module()
    model.decoder = nn.ModuleList(
        [Layer(nn.Identity()), Layer(attention[0]), Layer(attention[1], attention[2])]
    )
    model.heads = nn.ModuleList([nn.Identity()])
    assert find_blocks(model, registered(model)) == [
        Block(1, model.decoder[1], (attention[0],)),
        Block(2, model.decoder[2], (attention[1], attention[2])),
    ]


def test_an_encoder_of_images_is_no_decoder() -> None:
    """Its attention keeps no state, so the blocks are the language model's: it is served for text.

    vLLM's encoders have `MMEncoderAttention`, which is not in the static forward context.
    """
    model = nn.Module()
    model.vision_tower = nn.ModuleList([Layer(nn.Identity()) for _ in range(2)])
    model.language_model = nn.Module()
    attention = Attention()
    model.language_model.layers = nn.ModuleList([Layer(attention)])
    assert not issubclass(MMEncoderAttention, AttentionLayerBase)
    assert find_blocks(model, registered(model)) == [
        Block(0, model.language_model.layers[0], (attention,))
    ]


@pytest.mark.parametrize(("names", "found"), [((), "none"), (("a", "b"), "a, b")])
def test_a_model_without_one_list_of_blocks_is_refused(names: tuple[str, ...], found: str) -> None:
    model = nn.Module()
    for name in names:
        setattr(model, name, nn.ModuleList([Layer(Attention())]))
    with pytest.raises(SiteError, match=f"^expected one list of decoder blocks, found: {found}$"):
        find_blocks(model, registered(model))


@pytest.mark.parametrize("name", ["request#0@1", "a-b-c#1b@22", "-#0@3"])
def test_a_requests_name_is_found_in_vllms_id_of_it(name: str) -> None:
    request: Any = SimpleNamespace(external_req_id=None, request_id=name)
    InputProcessor.assign_request_id(request)
    assert request.request_id != name
    assert server_request_id(request.request_id) == name


def test_a_requests_name_is_vllms_id_where_that_is_not_made_unique(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    request: Any = SimpleNamespace(external_req_id=None, request_id="a-b#0@1")
    InputProcessor.assign_request_id(request)
    assert server_request_id(request.request_id) == "a-b#0@1"
