"""The mean of a prompt's rows.

A mean contains each selected row of the prompt once. Otherwise an error names the prompt.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.derivation.prompt_rows import Reading, read_rows
from rheostat_server.errors import NonFinite
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import to_wire
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
    for index in np.flatnonzero(~np.isfinite(result.norms)):
        site = reading.sites[index]
        raise NonFinite(f"the stream at {site.point.value} {site.layer} is not finite", field=path)
    return result


class _Mean:
    """Sums rows in float64 as they arrive."""

    def __init__(self, sites: tuple[Site, ...], width: int) -> None:
        messages = [to_wire(site) for site in sites]
        self._indices = {(site.point, site.layer): i for i, site in enumerate(messages)}
        self._sums = np.zeros((len(sites), width))
        self._norms = np.zeros(len(sites))
        self._counts = np.zeros(len(sites), dtype=np.int64)
        self._expected = 0

    def begin(self, admitted: AdmittedRequest, count: int) -> None:
        """Remembers how many rows each site gets."""
        self._expected = count

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self._sums.nbytes

    def add(self, part: capture_pb2.Captured) -> None:
        """Adds rows, [sites, positions, width], float32."""
        indices = [self._indices[site.point, site.layer] for site in part.sites]
        shape = tuple(part.tensor.shape)
        rows = np.frombuffer(part.tensor.inline, dtype="<f4").reshape(shape).astype(np.float64)
        with np.errstate(invalid="ignore"):
            self._sums[indices] += rows.sum(axis=1)
            self._norms[indices] += np.linalg.norm(rows, axis=2).sum(axis=1)
        self._counts[indices] += rows.shape[1]

    def complete(self) -> bool:
        """Whether every site got its rows."""
        return bool((self._counts == self._expected).all())

    def result(self) -> PromptMean:
        """The means. Every site must have a row."""
        rows = self._sums / self._counts[:, None]
        return PromptMean(rows.astype(np.float32), self._norms / self._counts)
