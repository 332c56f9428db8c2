"""The plugin `logging`: logs one line per block and per request, and stores nothing.

The lines have counts, and mean norms if requested.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from rheostat_server.sinks.protocol import (
    Artifact,
    Encoding,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    SinkRefusal,
    Target,
)
from rheostat_server.sinks.settings import only_known
from rheostat_server.sinks.tables import check_block
from rheostat_server.tensors import widened

_LOG = logging.getLogger(__name__)


def make(name: str, settings: Mapping[str, str]) -> "Logging":
    """The sink, which has no settings.

    Raises:
        SinkSettingsError: there is a setting.
    """
    only_known(settings, ())
    return Logging(name)


class Logging:
    """A sink that only logs."""

    layouts: Sequence[Layout] = ()
    options: Mapping[str, str] = {"norms": "true: also log the mean norm of rows of raw captures"}

    def __init__(self, name: str) -> None:
        self._name = name

    def check(self, target: Target) -> None:
        """Refuses anything but true and false."""
        if target.options.get("norms", "false") not in ("true", "false"):
            raise SinkRefusal("norms is true or false", "options.norms")

    def open(self, about: RequestAbout) -> "LogRecording":
        """Begins a recording."""
        return LogRecording(self._name, about)

    def artifacts(self, request_id: str) -> list[Artifact]:
        """None, because nothing is stored."""
        return []

    def close(self) -> None:
        """Does nothing."""


class LogRecording:
    """Logs one request."""

    pending: Sequence[str] = ()

    def __init__(self, name: str, about: RequestAbout) -> None:
        self._name = name
        self._about = about
        self._captures = {capture.capture_index: capture for capture in about.captures}
        self._norms = about.target.options.get("norms") == "true"
        self._rows = 0

    def write(self, block: RowBlock) -> None:
        """Logs a block. Raises SinkError if it does not fit its capture."""
        check_block(block, self._captures)
        self._rows += block.rows
        positions = f"{block.positions[0]} to {block.positions[-1]}" if block.rows else "none"
        _LOG.info(
            "%s: %s capture %d sample %d%s: %d rows at %d sites, positions %s%s",
            self._name,
            self._about.request_id,
            block.capture_index,
            block.sample,
            " of the baseline" if block.baseline else "",
            block.rows,
            len(block.sites),
            positions,
            self._mean_norm(block),
        )

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Logs the end."""
        _LOG.info(
            "%s: %s is %s: %d rows, %d lost",
            self._name, self._about.request_id, outcome.ending.value, self._rows,
            outcome.dropped_rows,
        )  # fmt: skip
        return []

    def abandon(self, error: BaseException) -> None:
        """Logs the failure."""
        _LOG.warning("%s: %s failed: %s", self._name, self._about.request_id, error)

    def _mean_norm(self, block: RowBlock) -> str:
        about = self._captures[block.capture_index]
        if not self._norms or about.encoding is not Encoding.RAW or not block.rows:
            return ""
        rows = widened(block.parts["rows"], about.dtype)
        return f", mean norm {np.linalg.norm(rows, axis=-1).mean():.4g}"
