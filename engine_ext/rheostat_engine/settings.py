"""What the server tells the workers, and how it travels.

Invariant: the settings ride in vLLM's `additional_config`, which enters vLLM's compile hash; a
graph that was compiled without our sites is therefore never loaded in place of one with them.
"""

from dataclasses import dataclass
from typing import Literal

from rheostat_engine.capacity import Capacity

_MIB = 1 << 20
_SITE_PROGRAM = 5
"""Rises whenever what we put into the compiled graph changes."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the extension, the same on every worker."""

    channel: str
    """ZeroMQ address that the server binds and every worker connects to."""
    bank_bytes: int = 256 * _MIB
    """Device memory for rows that are added; a quarter of it holds the other ops' directions."""
    capture_bytes: int = 512 * _MIB
    """Device memory for the ring that captured rows pass through."""
    encode_bytes: int = 128 * _MIB
    """Device memory for the forms in which captured rows leave: three quarters at most hold what
    rows are multiplied with, a quarter the work on them. Taken as it is needed."""
    staging_bytes: int = 1024 * _MIB
    """Host memory, pinned on CUDA, in which the captured rows of each worker that reports wait for
    the server; never less than the ring's."""
    pieces_in_flight: int = 2
    """Pieces of 16 MiB of captured rows that may be copied off the device at once; 0: all of a
    step's. The sampled tokens of a step wait for those that are under way."""
    slots: int = 4096
    """How many distinct configurations may be in use at once."""
    steps: int = 65536
    """How many steps all programs together may have that do more than add."""
    token_rules: int = 32
    """How many distinct rules about token ids may be in use at once."""

    def compute_hash(self) -> str:
        """What vLLM's compile cache must tell apart.

        No setting is part of it: the op's inputs have the stream's shape and the step's, which
        vLLM's own hash holds, and what the settings size is behind the op.
        """
        return f"rheostat sites {_SITE_PROGRAM}"

    def capacity(self, *, width: int, itemsize: int) -> Capacity:
        """What fits into that memory.

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
        """The settings that a worker finds as its `additional_config`.

        Raises:
            ValueError: it is something else.
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
