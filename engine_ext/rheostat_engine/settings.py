"""The settings that the server passes to the workers.

Invariant: the settings are vLLM's `additional_config`, which enters vLLM's compile hash. A graph
that was compiled without our sites is therefore never loaded instead of a graph with them.
"""

from dataclasses import dataclass
from typing import Literal

from rheostat_engine.plan.capacity import Capacity

_MIB = 1 << 20
_SITE_PROGRAM = 5
"""Must rise whenever our part of the compiled graph changes."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the extension, the same on every worker."""

    channel: str
    """ZeroMQ address that the server binds and every worker connects to."""
    bank_bytes: int = 256 * _MIB
    """Device memory for rows that are added; a quarter of it is for directions of other ops."""
    capture_bytes: int = 512 * _MIB
    """Device memory for the ring of captured rows."""
    encode_bytes: int = 128 * _MIB
    """Device memory for encoding captured rows: up to three quarters for the matrices of encodings,
    a quarter for intermediate results. Allocated when it is needed."""
    staging_bytes: int = 1024 * _MIB
    """Host memory, pinned on CUDA, in which the captured rows of each reporting worker wait for the
    server; at least the size of the ring."""
    copies_in_flight: int = 2
    """Chunks of 16 MiB of captured rows that may be copied off the device at once; 0: no limit. The
    sampled tokens of a step wait for these copies."""
    slots: int = 4096
    """Distinct configurations that may be in use at once."""
    steps: int = 65536
    """Steps of all programs that do more than add."""
    token_rules: int = 32
    """Distinct rules about token ids that may be in use at once."""

    def compute_hash(self) -> str:
        """Our part of the key of vLLM's compile cache.

        No setting is part of it. The op's inputs have the shapes of the stream and the step, which
        are in vLLM's own hash, and the compiled code does not see the buffers that settings size.
        """
        return f"rheostat sites {_SITE_PROGRAM}"

    def capacity(self, *, width: int, itemsize: int) -> Capacity:
        """The resources that fit into this memory.

        Args:
            width: W.
            itemsize: bytes of an element of the stream.
        """
        row = width * itemsize
        directions = self.bank_bytes // 4
        return Capacity(
            bank_rows=max(1, (self.bank_bytes - directions) // row - 1),
            directions=max(1, directions // (width * 4) - 1),
            steps=self.steps,
            slots=self.slots - 1,
            token_rules=self.token_rules,
            capture_rows=max(1, self.capture_bytes // row - 1),
        )

    @classmethod
    def from_config(cls, additional_config: object) -> "EngineSettings":
        """The settings from a worker's `additional_config`.

        Raises:
            ValueError: `additional_config` has another type.
        """
        if isinstance(additional_config, cls):
            return additional_config
        raise ValueError(
            "additional_config holds no rheostat settings; build the engine's arguments with "
            "rheostat_engine.engine_kwargs"
        )


def engine_kwargs(settings: EngineSettings, *, device: Literal["cpu", "cuda"]) -> dict[str, object]:
    """The arguments that put the extension into a vLLM engine.

    Pass them to `vllm.AsyncEngineArgs` beside your own.
    """
    worker = {"cpu": "CpuSiteWorker", "cuda": "GpuSiteWorker"}[device]
    return {
        "worker_cls": f"rheostat_engine.adapters.worker_{device}.{worker}",
        "scheduler_cls": "rheostat_engine.adapters.scheduler.site_scheduler",
        "additional_config": settings,
    }
