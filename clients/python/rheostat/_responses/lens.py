"""Results of the logit lens: the final norm and the unembedding, applied to rows of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rheostat._errors import ServerError
from rheostat._fields import counted
from rheostat._notebook import passage, text_table
from rheostat._points import PointLike, Site, point_of, read_site
from rheostat._positions import read_ranges, show_sites
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import lens_service_pb2, tensor_pb2

_SHOWN = 12
"""Characters of a token's text in a table."""


@dataclass(frozen=True, repr=False)
class LensResult:
    """The distribution of the next token that each row of a prompt amounts to.

    Arrays are [sites, positions, ...]. ``print`` shows the likeliest token of each row.
    """

    sites: tuple[Site, ...]
    """By layer, then point."""
    positions: tuple[int, ...]
    """Positions, the same at each site. A run may have positions after its prompt."""
    prompt_token_ids: tuple[int, ...]
    """The whole prompt."""
    prompt_texts: tuple[str, ...]
    """The text of each token of the prompt; empty if the server has no tokenizer."""
    token_ids: tuple[int, ...]
    """The tokens that were asked for."""
    texts: Mapping[int, str]
    """The text of each token in `token_ids` and `top_token_ids`, if the server has a tokenizer."""
    top_token_ids: npt.NDArray[np.int32]
    """[sites, positions, top_k]: the likeliest tokens, best first."""
    top_logprobs: FloatArray
    """[sites, positions, top_k]."""
    logprobs: FloatArray
    """[sites, positions, token_ids]: exact log-probabilities."""
    ranks: npt.NDArray[np.int32]
    """[sites, positions, token_ids]: 1 + the number of likelier tokens."""
    log_normalizers: FloatArray
    """[sites, positions]: a logit is the log-probability plus this number."""

    @property
    def logits(self) -> FloatArray:
        """[sites, positions, token_ids]: the logits of the tokens that were asked for."""
        return self.logprobs + self.log_normalizers[..., None]

    def at(self, point: PointLike, layer: int) -> int:
        """The index of a site in the arrays. Raises KeyError if it was not read."""
        site = Site(point_of(point), layer)
        if site not in self.sites:
            raise KeyError(str(site))
        return self.sites.index(site)

    def rows(self) -> list[dict[str, object]]:
        """A dict for each site, position and token, for `pandas.DataFrame` and other tables.

        The keys are point, layer, position, token_id, text, logprob, rank. A token that was asked
        for comes once, even if it is one of the likeliest.
        """
        made: list[dict[str, object]] = []
        for s, site in enumerate(self.sites):
            for p, position in enumerate(self.positions):
                asked = zip(self.token_ids, self.logprobs[s, p], self.ranks[s, p], strict=True)
                found = {token: (float(value), int(rank)) for token, value, rank in asked}
                top = zip(self.top_token_ids[s, p], self.top_logprobs[s, p], strict=True)
                for rank, (token, value) in enumerate(top, start=1):
                    found.setdefault(int(token), (float(value), rank))
                made.extend(
                    {
                        "point": site.point.value,
                        "layer": site.layer,
                        "position": position,
                        "token_id": token,
                        "text": self.texts.get(token, ""),
                        "logprob": value,
                        "rank": rank,
                    }
                    for token, (value, rank) in found.items()
                )
        return made

    def __repr__(self) -> str:
        return (
            f"LensResult({show_sites(self.sites)}, {counted(len(self.positions), 'position')}, "
            f"top {self.top_token_ids.shape[-1]}, {counted(len(self.token_ids), 'token')})"
        )

    def __str__(self) -> str:
        if not self.top_token_ids.shape[-1]:
            return repr(self)
        head = ["", *(_short(self._prompt_text(position)) for position in self.positions)]
        lines = [
            [
                str(site),
                *(_short(self.texts.get(int(token), str(token))) for token in tokens[:, 0]),
            ]
            for site, tokens in zip(self.sites, self.top_token_ids, strict=True)
        ]
        return text_table([head, *lines])

    def _prompt_text(self, position: int) -> str:
        if position >= len(self.prompt_token_ids):  # of a run, behind its prompt
            return f"[{position}]"
        if self.prompt_texts:
            return self.prompt_texts[position]
        return str(self.prompt_token_ids[position])

    def _repr_html_(self) -> str:
        return passage(str(self))


@dataclass(frozen=True, repr=False)
class Attribution:
    """A logit, or the difference of two, as a sum over the parts of the model.

    ``logit == contributions.sum() + bias + remainder``. ``print`` shows the largest contributions.
    """

    sites: tuple[Site, ...]
    """``resid_pre`` of layer 0, which is the embedding, then each ``attn_out`` and ``mlp_out``."""
    contributions: npt.NDArray[np.float64]
    """[sites]: what each adds to the logit."""
    bias: float
    """The part that does not depend on the prompt: biases of final norm and unembedding."""
    logit: float
    """The model's own logit of the token, minus that of the other token if there is one."""
    remainder: float
    """The rest: rounding, and what steering added to the stream."""
    scale: float
    """The factor by which the final norm multiplied the row."""
    prompt_token_ids: tuple[int, ...]

    def __getitem__(self, site: tuple[PointLike, int]) -> float:
        """The contribution of ``(point, layer)``. Raises KeyError if there is none."""
        wanted = Site(point_of(site[0]), site[1])
        if wanted not in self.sites:
            raise KeyError(str(wanted))
        return float(self.contributions[self.sites.index(wanted)])

    def top(self, count: int = 10) -> list[tuple[Site, float]]:
        """The contributions of largest magnitude, largest first."""
        order = np.argsort(-np.abs(self.contributions), kind="stable")[:count]
        return [(self.sites[i], float(self.contributions[i])) for i in order.tolist()]

    def __repr__(self) -> str:
        return f"Attribution(logit {self.logit:.4g}, {len(self.sites)} contributions)"

    def __str__(self) -> str:
        lines = [[str(site), f"{value:+.4f}"] for site, value in self.top()]
        others = self.logit - sum(value for _, value in self.top())
        return text_table(
            [*lines, ["everything else", f"{others:+.4f}"], ["sum", f"{self.logit:+.4f}"]]
        )

    def _repr_html_(self) -> str:
        return passage(str(self))


class LensAccumulator:
    """Turns `LensResponse` messages into a `LensResult`."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._started: lens_service_pb2.LensStarted | None = None
        self._parts: list[lens_service_pb2.LensRows] = []

    def add(self, message: lens_service_pb2.LensResponse) -> list[None]:
        """Take the next event."""
        match message.WhichOneof("event"):
            case "started":
                self._started = message.started
            case "rows":
                self._parts.append(message.rows)
        return []

    def result(self) -> LensResult:
        """The result, once the stream has ended with OK."""
        started, parts = self._started, self._parts
        sites = () if started is None else tuple(map(read_site, started.sites))
        positions = [p for run in read_ranges(started.positions) for p in run] if started else []
        rows = sum(part.row_count for part in parts)
        if started is None or not rows or rows != len(sites) * len(positions):
            raise ServerError("the server ended a lens without all its rows")
        shape = (len(sites), len(positions))
        texts = dict(zip(self._token_ids, started.texts, strict=False))
        for part in parts:
            texts |= zip(_array(part.top_token_ids).ravel().tolist(), part.top_texts, strict=False)

        def joined(name: str) -> npt.NDArray[np.generic]:
            whole: npt.NDArray[np.generic]
            whole = np.concatenate([_array(getattr(part, name)) for part in parts])
            whole.shape = (*shape, *whole.shape[1:])
            return whole

        return LensResult(
            sites,
            tuple(positions),
            tuple(started.prompt_token_ids.ids),
            tuple(started.prompt_texts),
            self._token_ids,
            texts,
            joined("top_token_ids").astype(np.int32),
            joined("top_logprobs").astype(np.float32),
            joined("logprobs").astype(np.float32),
            joined("ranks").astype(np.int32),
            joined("log_normalizers").astype(np.float32),
        )


def read_attribution(answer: lens_service_pb2.AttributeResponse) -> Attribution:
    return Attribution(
        tuple(map(read_site, answer.sites)),
        _array(answer.contributions).astype(np.float64),
        answer.bias,
        answer.logit,
        answer.remainder,
        answer.scale,
        tuple(answer.prompt_token_ids.ids),
    )


_KINDS = {
    tensor_pb2.DTYPE_INT32: "<i4",
    tensor_pb2.DTYPE_FLOAT32: "<f4",
    tensor_pb2.DTYPE_FLOAT64: "<f8",
}


def _array(tensor: tensor_pb2.Tensor) -> npt.NDArray[np.generic]:
    kind = _KINDS.get(tensor.dtype)
    if kind is None or tensor.encoding != tensor_pb2.ENCODING_RAW:
        raise ServerError("the server sent a lens in a form that this client does not know")
    try:
        array: npt.NDArray[np.generic] = np.frombuffer(tensor.inline, kind)
        shaped: npt.NDArray[np.generic] = array.reshape(tuple(tensor.shape))
    except ValueError as error:
        raise ServerError(f"the server sent a malformed lens: {error}") from error
    return shaped


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
