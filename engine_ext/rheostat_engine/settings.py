"""The settings that the server passes to the workers.

Invariant: the settings are vLLM's `additional_config`, which is part of vLLM's compile hash. So
vLLM never loads a graph that was compiled without our sites, or with those of another version.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from rheostat_engine.plan.capacity import MAX_BANK_ROWS, Capacity

_MIB = 1 << 20
_ROW_SUM_BYTES = 32 * _MIB
"""Device memory for sums of rows."""
_ROW_SUMS = 4096
"""The most sums of rows. Narrow models need less memory."""
_PACKAGE = Path(__file__).parent
_GRAPH_SOURCES = (
    "sites",
    "plan/points.py",
    "adapters/assembly.py",
    "adapters/blocks.py",
    "adapters/routers.py",
)
"""Folders and modules that decide which of our ops are in the compiled graph, and where."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the extension, the same on every worker."""

    channel: str
    """ZeroMQ address that the server binds and every worker connects to."""
    bank_bytes: int = 256 * _MIB
    """Device memory for rows to add; a quarter is for the directions of other ops."""
    capture_bytes: int = 512 * _MIB
    """Device memory for the ring of captured rows."""
    encode_bytes: int = 128 * _MIB
    """Device memory for encoding captured rows: up to three quarters for matrices, a quarter for
    intermediate results. Allocated on demand."""
    staging_bytes: int = 1024 * _MIB
    """Host memory of each reporting worker for captured rows that the server has not read yet.
    Pinned on CUDA. At least the size of the ring."""
    copies_in_flight: int = 2
    """Chunks of 16 MiB of captured rows that are copied to the host at once; 0: no limit. A step's
    sampled tokens wait for these copies."""
    slots: int = 4096
    """Distinct combinations of programs in use at once."""
    steps: int = 65536
    """Steps of all programs that do more than add."""
    token_rules: int = 32
    """Distinct rules about token ids in use at once."""
    controllers: tuple[str, ...] = ()
    """Names of the controllers that requests may use; see `plan.controllers`."""
    controller_budget: float = 0.002
    """Seconds that a call of a controller may take."""

    @property
    def failure_file(self) -> Path:
        """The file in which a worker writes why it did not start, beside the channel's socket.

        vLLM tells the server only that a worker did not start.
        """
        return Path(self.channel.removeprefix("ipc://")).with_name("failure")

    def compute_hash(self) -> str:
        """Our part of vLLM's compile hash.

        It is made from our source code. vLLM's cache is shared by all servers of a user, also of
        other versions, and vLLM itself compares only code that the compiler traces. It contains no
        setting: the op's input shapes are in vLLM's own hash, and the compiled code does not refer
        to the buffers whose sizes are set here.
        """
        return f"rheostat sites {source_digest(_PACKAGE)}"

    def capacity(self, *, width: int, itemsize: int) -> Capacity:
        """The resources that fit; `itemsize` is bytes per element of the stream, `width` W."""
        row = width * itemsize
        directions = self.bank_bytes // 4
        return Capacity(
            bank_rows=min(MAX_BANK_ROWS, max(1, (self.bank_bytes - directions) // row - 1)),
            directions=max(1, directions // (width * 4) - 1),
            steps=self.steps,
            slots=self.slots - 1,
            token_rules=self.token_rules,
            capture_rows=max(1, self.capture_bytes // row - 1),
            row_sums=max(1, min(_ROW_SUMS, _ROW_SUM_BYTES // (8 * (width + 1)))),
        )

    @classmethod
    def from_config(cls, additional_config: object) -> "EngineSettings":
        """The settings from a worker's `additional_config`.

        Raises:
            ValueError: `additional_config` has the wrong type.
        """
        if isinstance(additional_config, cls):
            return additional_config
        raise ValueError(
            "additional_config holds no rheostat settings; build the engine's arguments with "
            "rheostat_engine.engine_kwargs"
        )


@cache
def source_digest(package: Path, sources: Sequence[str] = _GRAPH_SOURCES) -> str:
    """A digest of the source code that decides what vLLM compiles.

    Args:
        package: the folder of `rheostat_engine`.
        sources: folders and modules in it.
    """
    digest = hashlib.sha256()
    for name in sources:
        path = package / name
        for module in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            source = module.read_bytes()
            digest.update(f"{module.name} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def engine_kwargs(settings: EngineSettings, *, device: Literal["cpu", "cuda"]) -> dict[str, object]:
    """Arguments for `vllm.AsyncEngineArgs` that install the extension in an engine."""
    worker = {"cpu": "CpuSiteWorker", "cuda": "GpuSiteWorker"}[device]
    return {
        "worker_cls": f"rheostat_engine.adapters.worker_{device}.{worker}",
        "scheduler_cls": "rheostat_engine.adapters.scheduler.site_scheduler",
        "additional_config": settings,
    }
