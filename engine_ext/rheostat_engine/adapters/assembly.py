"""Builds a worker's sites once its model is loaded and nothing is compiled yet.

Invariant: every block of this rank has its sites, or startup fails with the reason.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from rheostat_engine.adapters.blocks import find_blocks
from rheostat_engine.adapters.controllers import load_controllers, share_decision
from rheostat_engine.adapters.embedding import EmbeddingPart, measure_embedding
from rheostat_engine.adapters.probing import forward_context, probe_tokens, run_once
from rheostat_engine.adapters.refusals import refuse_unserved
from rheostat_engine.adapters.routers import Routers, find_routers
from rheostat_engine.adapters.runner import disable_lora, server_request_id
from rheostat_engine.adapters.unembedding import Unembedding, find_unembedding
from rheostat_engine.plan.capacity import Capacity
from rheostat_engine.plan.points import ROUTERS
from rheostat_engine.settings import EngineSettings
from rheostat_engine.sites.block_layout import BlockLayout, SiteError
from rheostat_engine.sites.install import install
from rheostat_engine.sites.op import bind
from rheostat_engine.sites.probe import probe
from rheostat_engine.worker.capture.captures import Captures
from rheostat_engine.worker.expander import Expander
from rheostat_engine.worker.instructions import COLUMNS
from rheostat_engine.worker.runtime import SiteRuntime
from rheostat_engine.worker.state.buffers import Buffers, GateBuffers
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.steering.bank import Bank
from rheostat_engine.worker.steering.doses import Doses
from rheostat_engine.worker.steering.gain_states import GainStates
from rheostat_engine.worker.steering.gate_states import GateStates
from rheostat_engine.worker.steering.steering import Steering
from rheostat_engine.worker.steering.token_rules import TokenRules
from rheostat_engine.worker.transport.event_sender import EventSender
from rheostat_engine.worker.transport.row_encodings import RowEncodings
from rheostat_engine.worker.transport.row_sender import RowSender
from rheostat_engine.worker.transport.staging_area import StagingArea

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled:
    """A worker's sites."""

    runtime: SiteRuntime
    capacity: Capacity
    refused: dict[str, str]
    """The reason for each missing point."""
    routers: Routers
    block_layouts: dict[int, str]
    """By layer: the stream layout, "pair" or "single"."""
    num_layers: int
    unembedding: Unembedding
    """Its final norm and unembedding."""
    embedding: EmbeddingPart | None = None
    """This rank's part of the token embedding; None after the first pipeline stage."""


def assemble(
    runner: LoRAModelRunnerMixin,
    model: nn.Module,
    config: VllmConfig,
    device: torch.device,
    tokens: int,
) -> Assembled:
    """Finds and installs the sites.

    Args:
        runner: the model's runner.
        model: loaded, not compiled.
        config: the engine's configuration.
        device: the device of the model.
        tokens: the most tokens of a forward pass, including padding.

    Raises:
        SiteError: the model or the configuration can't be served.
    """
    without_lora = partial(disable_lora, runner)
    without_lora()
    refuse_unserved(config)
    settings = EngineSettings.from_config(config.additional_config)
    width = config.model_config.get_hidden_size()
    layers = config.model_config.get_total_num_hidden_layers()  # of all pipeline stages
    rank = config.parallel_config.rank
    dtype = cast(torch.dtype, config.model_config.dtype)
    run = partial(run_once, model, config, device)
    blocks = find_blocks(model, config)
    with forward_context(config):
        layouts = probe(blocks, width, run, rank=get_tensor_model_parallel_rank())
        routers = find_routers(blocks, config, width, run)
    unembedding = find_unembedding(
        model, config, blocks, run, device=device, without_lora=without_lora
    )
    first = get_pp_group().is_first_rank
    embedding = None
    if first:
        embedding = measure_embedding(model, blocks[0], width, run, probe_tokens(device))
    site_slots = SiteSlots(layers, routers=bool(routers.experts))
    capacity = settings.capacity(width=width, itemsize=dtype.itemsize)
    bank = Bank(sites=site_slots.count, capacity=capacity, width=width, dtype=dtype, device=device)
    vocabulary = config.model_config.get_vocab_size()
    rules = TokenRules(capacity.token_rules, capacity.ruled_intervals, vocabulary, device)
    doses = Doses(site_slots.count, device)
    buffers = Buffers(
        tokens=tokens,
        rows=bank.programs.rows,
        directions=bank.programs.directions,
        ints=bank.programs.ints,
        floats=bank.programs.floats,
        gates=GateBuffers.allocate(
            tokens,
            capacity.gate_states,
            bank.programs.gate_ints,
            bank.programs.gate_floats,
            row_sums=capacity.row_sums,
            width=width,
        ),
        doses=doses.dose_slots,
        ring=torch.zeros(capacity.capture_rows + 1, width, dtype=dtype, device=device),
    )
    installed = install(blocks, layouts, buffers, width=width, entry=first)
    bind(buffers)
    routed = routers.install(buffers, lambda layer: site_slots.of(ROUTERS + layer))
    expected = frozenset([*(site.index for site in installed), *routed])
    _verify(buffers, expected, run)
    expander = Expander(buffers, bank.code_of, rules, tokens)
    if device.type == "cuda":
        from rheostat_engine.sites.kernels import warm_up

        idle = np.zeros((COLUMNS, 1), np.int32)  # one token without acts and captures
        nothing = expander.instructions(idle, None, 0, torch.zeros(0))
        warm_up(buffers, nothing, narrow=routers.rows)
    reports = get_tensor_model_parallel_rank() == 0
    gates, gains = GateStates(buffers.of(0)), GainStates(buffers.gates)
    steering = Steering(bank, rules, doses, gates, gains, site_slots)
    row_sender, captures = None, None
    if reports:
        scratch = settings.encode_bytes // 4
        row_sender = RowSender(
            EventSender(settings.channel),
            device,
            StagingArea(max(settings.staging_bytes, buffers.ring.nbytes), device),
            scratch=scratch,
            in_flight=settings.copies_in_flight,
        )
        captures = Captures(
            buffers.ring,
            row_sender,
            RowEncodings(
                width=width,
                itemsize=dtype.itemsize,
                vectors=steering.vectors,
                limit=settings.encode_bytes - scratch,
            ),
            site_slots=site_slots,
            present=expected,
            rank=rank,
        )
    runtime = SiteRuntime(
        buffers=buffers,
        steering=steering,
        captures=captures,
        expander=expander,
        row_sender=row_sender,
        rank=rank,
        site_slots=site_slots,
        sites=expected,
        server_request_id=server_request_id,
        controllers=load_controllers(settings) if reports else None,
        share=share_decision,
    )
    refused = _refused(layouts)
    _LOG.info(
        "%d sites and %d routers in %d blocks; not served: %s",
        len(installed),
        len(routed),
        len(blocks),
        refused or "none",
    )
    stream_layouts = {
        block.layer: layout.stream_layout.value
        for block, layout in zip(blocks, layouts, strict=True)
    }
    return Assembled(
        runtime,
        capacity,
        refused,
        routers,
        stream_layouts,
        layers,
        unembedding,
        embedding,
    )


def _verify(buffers: Buffers, expected: frozenset[int], run_model: Callable[[], object]) -> None:
    """Runs the model once more: each installed site must run exactly once, and no other site."""
    buffers.call_counts = [0] * buffers.sites
    run_model()
    call_counts, buffers.call_counts = buffers.call_counts, None
    wrong = {s: n for s, n in enumerate(call_counts) if n != (s in expected)}
    if wrong:
        raise SiteError(
            f"of the installed sites {sorted(expected)}, these did not run exactly once: "
            f"{wrong} (site: runs)"
        )


def _refused(layouts: list[BlockLayout]) -> dict[str, str]:
    """Joins the blocks' reasons for missing points."""
    reasons: dict[str, dict[str, None]] = {}
    for layout in layouts:
        for point, reason in layout.refused.items():
            reasons.setdefault(point.value, {})[reason] = None
    return {point: "; ".join(texts) for point, texts in reasons.items()}
