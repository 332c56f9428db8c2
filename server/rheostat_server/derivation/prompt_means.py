"""The mean of a prompt's rows.

A mean contains each selected row of the prompt once. Otherwise an error names the prompt.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.derivation.prompt_rows import Reading, Rows, check_finite, read_rows
from rheostat_server.requests.manager import RequestManager
from rheostat_server.tasks.offload import offload
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, types_pb2


class PromptMean(NamedTuple):
    """The means of a prompt."""

    rows: FloatArray
    """[sites, width]: the mean of the selected rows."""
    norms: npt.NDArray[np.float64]
    """[sites]: the mean of their L2 norms."""


async def read_prompt(
    prompt: types_pb2.Prompt, path: str, reading: Reading, manager: RequestManager
) -> PromptMean:
    """Runs a prompt, and returns its means. A cancelled call aborts the request.

    `path` is the field of the prompt, for errors.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    mean = _Mean(reading.sites, manager.sites.width)
    await read_rows(prompt, path, reading, manager, mean)
    result = await offload(mean.nbytes, mean.result)
    check_finite(result.norms, reading.sites, path)
    return result


class _Mean(Rows):
    """Sums rows in float64 as they arrive."""

    def __init__(self, sites: Sequence[Site], width: int) -> None:
        super().__init__(sites)
        self._sums = np.zeros((len(sites), width))
        self._norms = np.zeros(len(sites))

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self._sums.nbytes

    def _take(self, indices: list[int], rows: FloatArray, part: capture_pb2.Captured) -> None:
        wide = rows.astype(np.float64)
        with np.errstate(invalid="ignore"):
            self._sums[indices] += wide.sum(axis=1)
            self._norms[indices] += np.linalg.norm(wide, axis=2).sum(axis=1)

    def result(self) -> PromptMean:
        """The means. Every site must have a row."""
        rows = self._sums / self._counts[:, None]
        return PromptMean(rows.astype(np.float32), self._norms / self._counts)
