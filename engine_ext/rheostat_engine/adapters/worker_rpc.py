"""Worker methods that the server calls through `collective_rpc`.

Invariant: each method runs between two steps and returns plain data.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.worker.worker_base import CompilationTimes

from rheostat_engine.adapters.assembly import Assembled
from rheostat_engine.adapters.parent_watch import leave_group
from rheostat_engine.plan.tables import STEP_COST
from rheostat_engine.process_end import skip_last_collection
from rheostat_engine.settings import EngineSettings
from rheostat_engine.sites.op import call_directly
from rheostat_engine.worker.capture.captures import Captures, CapturesUpdate
from rheostat_engine.worker.steering.steering import UpdateResult


class SiteRpc:
    """Mixin of our workers."""

    model_runner: Any  # vLLM's workers declare different types; ours have `sites`
    vllm_config: VllmConfig

    @property
    def _assembled(self) -> Assembled:
        assembled: Assembled = self.model_runner.sites
        return assembled

    def rheostat_describe(self) -> dict[str, object]:
        """Describes the model and the worker for `ModelSites.from_reports`."""
        assembled = self._assembled
        buffers = assembled.runtime.buffers
        captures = assembled.runtime.captures
        runner = self.model_runner
        config = runner.vllm_config
        return {
            "architecture": config.model_config.architecture,
            "num_layers": assembled.num_layers,
            "width": buffers.ring.shape[1],
            "dtype": str(buffers.ring.dtype).removeprefix("torch."),
            "runner": getattr(runner, "runner_name", "V1"),
            "refused": assembled.refused,
            "experts": assembled.routers.experts,
            "unrouted": assembled.routers.refused,
            "block_layouts": assembled.block_layouts,
            "variants": sorted(buffers.active.steps),
            "embedding": None if assembled.embedding is None else asdict(assembled.embedding),
            "capacity": asdict(assembled.capacity),
            "reports": captures is not None,
            "no_lens": assembled.unembedding.refused,
            "no_directions": assembled.unembedding.not_linear,
            "staging": None if captures is None else captures.row_sender.area.report(captures.rank),
        }

    def rheostat_load_vectors(self, vectors: Mapping[str, tuple[Sequence[float], bytes]]) -> None:
        """Stores float32 vectors: hex digest -> (L2 norm of each row, little-endian [rows, W])."""
        contents, norms = {}, {}
        for name, (lengths, data) in vectors.items():
            digest = bytes.fromhex(name)
            contents[digest] = np.frombuffer(data, "<f4").reshape(len(lengths), -1)
            norms[digest] = np.array(lengths, np.float32)
        self._assembled.runtime.steering.load(contents, norms)

    def rheostat_drop_vectors(self, digests: Sequence[str]) -> None:
        """Drops vectors by hex digest."""
        self._assembled.runtime.steering.drop([bytes.fromhex(digest) for digest in digests])

    def rheostat_update_steering(
        self, updates: Sequence[tuple[object, Sequence[str], int]]
    ) -> list[list[UpdateResult]]:
        """Replaces the acts of running requests; see `SiteRuntime.update_steering`.

        Args:
            updates: (`Plan.to_wire` with the new acts, ids of the requests, first position that may
                change).

        Returns:
            For each update, the `UpdateResult` of each request.
        """
        update = self._assembled.runtime.update_steering
        return [
            [update(name, wire, not_before) for name in names]
            for wire, names, not_before in updates
        ]

    def rheostat_prepare(self, name: str, wire: object, plan_cost: int) -> tuple[bool, str]:
        """Builds a part of a plan's tables; returns the `Prepared` of `Preparations.build_part`."""
        return self._assembled.runtime.preparations.build_part(name, wire, plan_cost)

    def rheostat_release(self, names: Sequence[str]) -> bool:
        """Releases preparations and a part of the unused tables; returns whether more are left.

        Each step releases a part too. An idle worker has no steps, so the server calls this again.
        """
        runtime = self._assembled.runtime
        for name in names:
            runtime.preparations.release(name)
        return runtime.steering.built_tables.collect(STEP_COST)

    def rheostat_update_captures(
        self, updates: Mapping[str, tuple[int, object, int] | None]
    ) -> None:
        """Replaces the captures of requests; see `SiteRuntime.update_captures`."""
        self._assembled.runtime.update_captures(
            {
                name: None if update is None else CapturesUpdate(*update)
                for name, update in updates.items()
            }
        )

    def rheostat_lens(
        self, rows: bytes, top_k: int, token_ids: Sequence[int], reference: bytes
    ) -> dict[str, bytes] | None:
        """Reads rows of the stream with the final norm and the unembedding; see `LensRows`.

        Args:
            rows: little-endian float32 [n, W]. The caller limits n times the vocabulary.
            top_k: number of likeliest tokens.
            token_ids: tokens whose log-probabilities and ranks are wanted.
            reference: float32 [1, W] or [n, W], to whose distribution each row is compared; may be
                empty.

        Returns:
            Arrays of float32 and int32 by name; None on ranks that don't get the logits.
        """
        width = self._assembled.runtime.buffers.ring.shape[1]
        against = _rows(reference, width) if reference else None
        read = self._assembled.unembedding.read(_rows(rows, width), top_k, token_ids, against)
        if read is None:
            return None
        result, scales = read
        return {"scales": _data(scales), **{n: _data(t) for n, t in result._asdict().items()}}

    def rheostat_directions(self, token_ids: Sequence[int]) -> tuple[bytes, bytes] | None:
        """The directions [m, W] and offsets [m] of tokens, float32; see `Unembedding`."""
        directions = self._assembled.unembedding.directions(token_ids)
        return None if directions is None else (_data(directions.rows), _data(directions.offsets))

    def rheostat_save_random_state(self) -> None:
        """Saves the random state from which unseeded requests are sampled."""
        cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._random_state = np.random.get_state(), torch.random.get_rng_state(), cuda_state

    def rheostat_restore_random_state(self) -> None:
        """Restores the saved random state."""
        numpy_state, cpu_state, cuda_state = self._random_state
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    def rheostat_stats(self) -> dict[str, object]:
        """Returns counts since the start, and the resources in use.

        Releases a part of the unused tables, because an idle worker has no steps.
        """
        runtime = self._assembled.runtime
        runtime.steering.built_tables.collect(STEP_COST)
        bank = runtime.steering.bank
        return {
            "bank_rows_used": bank.programs.rows_used,
            "directions_used": bank.programs.directions_used,
            "steps_used": bank.programs.steps_used,
            "slots_used": bank.slots_used,
            "gates_used": bank.programs.gates_used,
            "gate_states_used": runtime.steering.gates.used,
            "token_rules_used": len(runtime.steering.rules),
            "unused_tables": runtime.steering.built_tables.has_unused,
            "requests": runtime.requests,
            **_capture_stats(runtime.captures),
            "steps": dict(runtime.buffers.active.steps),
            "controllers": runtime.controllers.stats(),
            "own_graphs": runtime.buffers.active.own_graphs,
            "held_graphs": runtime.buffers.active.held_graphs,
        }

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # vLLM's own, passed through
        """As vLLM's. If it fails, the reason is written down for the server."""
        try:
            super().load_model(*args, **kwargs)  # type: ignore[misc]  # as below
        except Exception as error:
            settings = EngineSettings.from_config(self.vllm_config.additional_config)
            with suppress(OSError):
                settings.failure_file.write_text(str(error), encoding="utf-8")
            raise

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """As in vLLM. Then prepares the worker for requests, because nothing is compiled any more.

        It leaves the process group, lets steps call sites directly, and freezes all objects, which
        garbage collections then skip. vLLM freezes those of the engine core's process only. On a
        CPU, and with several ranks, each worker is a process of its own with 700,000 objects. A
        full garbage collection there made a step 0.4 to 0.6 s longer.
        """
        times: CompilationTimes = super().compile_or_warm_up_model()  # type: ignore[misc]  # as below
        # Not sooner, because only a signal to the group ends a worker that is still loading.
        leave_group()
        skip_last_collection()
        call_directly()
        freeze_gc_heap()
        return times

    def shutdown(self) -> None:
        """As vLLM's, after the last rows were sent."""
        assembled = getattr(getattr(self, "model_runner", None), "sites", None)
        if assembled is not None:
            assembled.runtime.close()
        super().shutdown()  # type: ignore[misc]  # precedes one of vLLM's workers


def _rows(data: bytes, width: int) -> torch.Tensor:  # [n, width], float32
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(-1, width)


def _data(tensor: torch.Tensor) -> bytes:
    """A tensor's elements, as little-endian float32 or int32."""
    kind = "<f4" if tensor.is_floating_point() else "<i4"
    return tensor.cpu().numpy().astype(kind).tobytes()


def _capture_stats(captures: Captures | None) -> dict[str, object]:
    """Counts and memory of captured rows; zeros on a rank that does not report."""
    if captures is None:
        return {"captured_rows": 0, "lost_rows": 0}
    row_sender, encodings = captures.row_sender, captures.encodings
    return {
        "captured_rows": captures.captured_rows - row_sender.lost_rows,
        "lost_rows": captures.lost_rows + row_sender.lost_rows,
        "left_bytes": row_sender.left_bytes,
        "plain_rows": captures.plain_rows + row_sender.plain_rows,
        "row_encodings_used": len(encodings),
        "ring_bytes": captures.ring_bytes,
        "encode_bytes": encodings.bytes + row_sender.scratch,
        "staging_bytes": row_sender.area.size,
        "staging_skipped_bytes": row_sender.area.ranges.skipped_bytes,
        "pinned": row_sender.area.pinned,
    }
