"""Builds a worker's sites once its model is loaded and nothing is compiled yet.

Invariant: either every block of this rank has its sites, or startup fails saying why.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from rheostat_engine.adapters.blocks import find_blocks, layer_count
from rheostat_engine.adapters.names import name_of
from rheostat_engine.adapters.probing import contextual, run_once
from rheostat_engine.adapters.refusals import refuse_unserved
from rheostat_engine.adapters.routers import Routers, find_routers
from rheostat_engine.capacity import Capacity
from rheostat_engine.core.bank import Bank
from rheostat_engine.core.buffers import Buffers
from rheostat_engine.core.captures import Captures
from rheostat_engine.core.delivery import Delivery
from rheostat_engine.core.doses import Doses
from rheostat_engine.core.expand import Compact, Expander
from rheostat_engine.core.forms import Forms
from rheostat_engine.core.outlet import Outlet
from rheostat_engine.core.places import Places
from rheostat_engine.core.rules import TokenRules
from rheostat_engine.core.runtime import SiteRuntime
from rheostat_engine.core.staging import StagingArea
from rheostat_engine.core.steering import Steering
from rheostat_engine.points import ROUTERS
from rheostat_engine.settings import EngineSettings
from rheostat_engine.sites.forms import BlockForm, SiteError
from rheostat_engine.sites.install import install
from rheostat_engine.sites.op import bind
from rheostat_engine.sites.probe import probe

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled:
    """A worker's sites."""

    runtime: SiteRuntime
    capacity: Capacity
    refused: dict[str, str]
    """Reason by point of the stream that the model lacks."""
    routers: Routers
    """Of this rank's part of the model."""
    block_forms: dict[int, str]
    """How each block of this rank holds the stream, by layer: "pair" or "single"."""
    num_layers: int
    reports: bool
    """Whether this rank speaks to the server."""


def assemble(
    model: nn.Module, config: VllmConfig, *, device: torch.device, tokens: int, rank: int
) -> Assembled:
    """Finds and installs the sites.

    Args:
        model: loaded, not compiled.
        config: the engine's configuration.
        device: the model's.
        tokens: the most tokens of a forward pass, padding included.
        rank: this worker's.

    Raises:
        SiteError: the model or the configuration can't be served.
    """
    refuse_unserved(config)
    settings = EngineSettings.from_config(config.additional_config)
    width = config.model_config.get_hidden_size()
    layers = layer_count(config)
    dtype = cast(torch.dtype, config.model_config.dtype)
    blocks = find_blocks(model, config)
    with contextual(config):
        forms = probe(
            blocks,
            width,
            lambda: run_once(model, config, device),
            rank=get_tensor_model_parallel_rank(),
        )
        routers = find_routers(blocks, config, width, lambda: run_once(model, config, device))
    places = Places(layers, routers=bool(routers.experts))
    capacity = settings.capacity(width=width, itemsize=dtype.itemsize)
    bank = Bank(sites=places.count, capacity=capacity, width=width, dtype=dtype, device=device)
    vocabulary = config.model_config.get_vocab_size()
    rules = TokenRules(capacity.token_rules, capacity.ruled_pieces, vocabulary, device)
    doses = Doses(places.count, device)
    buffers = Buffers(
        tokens=tokens,
        rows=bank.programs.rows,
        directions=bank.programs.directions,
        ints=bank.programs.ints,
        floats=bank.programs.floats,
        doses=doses.cells,
        ring=torch.zeros(capacity.capture_rows + 1, width, dtype=dtype, device=device),
    )
    installed = install(blocks, forms, buffers, width=width, entry=get_pp_group().is_first_rank)
    bind(buffers)
    routed = routers.install(buffers, lambda layer: places.of(ROUTERS + layer))
    expected = frozenset([*(site.index for site in installed), *routed])
    _verify(buffers, expected, lambda: run_once(model, config, device))
    expander = Expander(buffers, bank.code_of, rules, tokens)
    if device.type == "cuda":
        from rheostat_engine.sites.kernels import warm_up

        nothing = expander.instructions(_nothing(), torch.zeros(0))
        warm_up(buffers, nothing, narrow=routers.rows)
    reports = get_tensor_model_parallel_rank() == 0
    steering = Steering(bank, rules, doses, places)
    outlet, captures = None, None
    if reports:
        scratch = settings.encode_bytes // 4
        outlet = Outlet(
            Delivery(settings.channel),
            device,
            StagingArea(max(settings.staging_bytes, buffers.ring.nbytes), device),
            scratch=scratch,
            in_flight=settings.pieces_in_flight,
        )
        captures = Captures(
            buffers.ring,
            outlet,
            Forms(
                width=width,
                itemsize=dtype.itemsize,
                vectors=steering.vectors,
                limit=settings.encode_bytes - scratch,
            ),
            places=places,
            present=expected,
            rank=rank,
        )
    runtime = SiteRuntime(
        buffers=buffers,
        steering=steering,
        captures=captures,
        expander=expander,
        outlet=outlet,
        rank=rank,
        places=places,
        sites=expected,
        name_of=name_of,
    )
    refused = _refused(forms)
    _LOG.info(
        "%d sites and %d routers in %d blocks; not served: %s",
        len(installed),
        len(routed),
        len(blocks),
        refused or "none",
    )
    held = {block.layer: form.carrier.value for block, form in zip(blocks, forms, strict=True)}
    return Assembled(runtime, capacity, refused, routers, held, layers, reports)


def _verify(buffers: Buffers, expected: frozenset[int], run_model: Callable[[], object]) -> None:
    """Runs the model once more: every site that was put in must run exactly once, no other."""
    buffers.census = [0] * buffers.sites
    run_model()
    census, buffers.census = buffers.census, None
    wrong = {s: n for s, n in enumerate(census) if n != (s in expected)}
    if wrong:
        raise SiteError(
            f"of the sites {sorted(expected)} that were put in, these did not run exactly once: "
            f"{wrong} (site: runs)"
        )


def _nothing() -> Compact:
    """A step of one token, which does nothing."""
    none = np.zeros(1, np.int32)
    return Compact(none, none, none, none, none, base=None)


def _refused(forms: list[BlockForm]) -> dict[str, str]:
    """Why points are not served: what is said of them in any block."""
    reasons: dict[str, dict[str, None]] = {}
    for form in forms:
        for point, reason in form.refused.items():
            reasons.setdefault(point.value, {})[reason] = None
    return {point: "; ".join(said) for point, said in reasons.items()}
