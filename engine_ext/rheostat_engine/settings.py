"""What the server tells the workers, and how it travels.

Invariant: the settings ride in vLLM's `additional_config`, which enters vLLM's compile hash; a
graph that was compiled without our sites is therefore never loaded in place of one with them.
"""

from dataclasses import dataclass
from typing import Literal

_MIB = 1 << 20
_SITE_PROGRAM = 1
"""Rises whenever what we put into the compiled graph changes."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the extension, the same on every worker."""

    channel: str
    """ZeroMQ address that the server binds and every worker connects to."""
    bank_bytes: int = 256 * _MIB
    """Device memory for the rows that steering adds."""
    capture_bytes: int = 512 * _MIB
    """Device memory for the ring that captured rows pass through."""
    slots: int = 4096
    """How many distinct configurations of rows may be in use at once."""

    def compute_hash(self) -> str:
        """What vLLM's compile cache must tell apart; the channel is not part of it."""
        return (
            f"rheostat sites {_SITE_PROGRAM}, bank {self.bank_bytes}, "
            f"capture {self.capture_bytes}, slots {self.slots}"
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
        "additional_config": settings,
    }
