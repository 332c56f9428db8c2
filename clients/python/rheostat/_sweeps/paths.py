"""Path patching: which rows each forward pass replaces, and the result of all passes.

Each pass runs the base prompt. A pass for a receiver replaces the senders' rows by those of the
source prompt, and the frozen branches' rows by those of the base prompt. The last pass replaces the
receivers' rows by their outputs in these passes. A branch to freeze is frozen in every pass except
its own, if it is a receiver. So an effect goes from a sender to a receiver directly, and not
through another receiver.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

import numpy as np

from rheostat._errors import invalid
from rheostat._fields import whole_number
from rheostat._points import NO_HEADS, Point, PointLike, Site, names_head, point_of
from rheostat._positions import show_sites
from rheostat._prompts import Prompt
from rheostat._responses.explanations import Explanation
from rheostat._responses.lens import LensResult
from rheostat._selectors import SelectorLike, positions
from rheostat._steering.replacements import (
    Align,
    FromRun,
    Noise,
    RunMean,
    Zeros,
    from_run,
    replace,
)
from rheostat._steering.steering import SteeringLike, interventions_of
from rheostat._steering.vectors import Intervention
from rheostat._sweeps.pairs import NoisyPrompt, Pair, TokenIds, answer_ids

BRANCHES = (Point.ATTN_OUT, Point.MLP_OUT)
"""The points that are written to the stream, in the order of a block."""

PASS_LEASE = 600.0
"""Seconds for which the server keeps the rows of a pass if the client does not delete them."""

Branch: TypeAlias = tuple[PointLike, int]
"""("attn_out", layer) or ("mlp_out", layer)."""

Branches: TypeAlias = Branch | Iterable[Branch]
"""One branch or several."""

Freeze: TypeAlias = PointLike | Iterable[PointLike | Branch]
"""Branches of all layers by point, or single branches."""


class PathOptions(TypedDict, total=False):
    """Options of `Engine.path_patch`."""

    where: SelectorLike
    """Tokens whose rows of the senders are exchanged. Default: the whole prompt."""
    receiver_where: SelectorLike
    """Tokens whose rows of the receivers may change. Default: the whole prompt."""
    freeze: Freeze
    """The branches between senders and receivers that keep the base prompt's rows: branches of all
    layers by point, or a list of single branches. Senders are never frozen where their rows are
    exchanged, and a receiver is not frozen in its own pass. Default: ("attn_out", "mlp_out"), so
    that only direct paths count. "attn_out" lets effects go through MLPs, as Wang et al. do. ()
    freezes nothing."""
    direction: Literal["denoise", "noise"]
    """"denoise" runs the corrupt prompt with the clean prompt's senders, "noise" the clean prompt
    with the corrupt prompt's. Default: "denoise"."""
    align: Align
    """How positions correspond. Default: "identity", for prompts of equal length."""
    steering: SteeringLike
    """Steering of all passes. Replacements act after it."""
    lora: str | None
    """An adapter."""


@dataclass(frozen=True)
class PathPatch:
    """The effect of some paths on the answer."""

    senders: tuple[Site, ...]
    receivers: tuple[Site, ...]
    """Empty: the logits."""
    frozen: tuple[Site, ...]
    """Branches that were held at the base prompt's rows, in some pass."""
    grade: Literal["logprob", "logit_difference"]
    """logit(answer) - logit(foil), or ln p(answer) of a pair without a foil."""
    base: float
    """The grade of the prompt that ran: the corrupt one with direction "denoise"."""
    source: float
    """The grade of the prompt that the senders' rows come from."""
    patched: float
    """The grade of the base prompt with the paths."""

    @property
    def effect(self) -> float:
        """The effect of the paths: patched - base."""
        return self.patched - self.base

    @property
    def recovered(self) -> float:
        """effect / (source - base); NaN if both prompts have the same grade."""
        whole = self.source - self.base
        return self.effect / whole if whole else math.nan

    def __str__(self) -> str:
        receivers = show_sites(self.receivers) if self.receivers else "logits"
        return (
            f"PathPatch({show_sites(self.senders)} -> {receivers}: {self.grade} "
            f"{self.base:.4g} -> {self.patched:.4g}, source {self.source:.4g})"
        )


class Paths:
    """The passes of a path patch.

    Raises InvalidRequest for heads and other points than branches, for a pair without a second
    prompt or an answer, and if no path leads from the senders to a receiver.
    """

    def __init__(
        self,
        pair: Pair,
        sender: Branches,
        receiver: Branches | Literal["logits"],
        options: PathOptions,
    ) -> None:
        if not isinstance(pair, Pair):
            raise invalid("pair", f"a pair is a rheostat.Pair, not {pair!r:.60}")
        if isinstance(pair.corrupt, NoisyPrompt | Noise | Zeros | RunMean | FromRun):
            raise invalid(
                "pair.corrupt",
                "path patching takes its rows from two prompts: give the second prompt as corrupt=",
            )
        self.pair = pair
        if pair.answer is None:
            raise invalid("pair.answer", "an answer is required", "REASON_MISSING_FIELD")
        direction = options.get("direction", "denoise")
        if direction not in ("denoise", "noise"):
            raise invalid("direction", f'direction is "denoise" or "noise", not {direction!r}')
        prompts: tuple[Prompt, Prompt] = (pair.corrupt, pair.prompt)
        self.base, self.source = prompts if direction == "denoise" else prompts[::-1]
        self.senders = _branches(sender, "sender")
        self.receivers: tuple[Site, ...] = ()
        if receiver != "logits":
            self.receivers = _branches(receiver, "receiver")
        for site in self.receivers:
            if _order(site) <= _order(self.senders[0]):
                raise invalid(
                    "receiver",
                    f"no path leads from {show_sites(self.senders)} to {site}: a receiver comes "
                    "after a sender in the forward pass (attn_out before mlp_out in a layer)",
                )
            if site in self.senders:
                raise invalid("receiver", f"{site} is a sender too: ask for one after the other")
        self._receiver_where = options.get("receiver_where") or "prompt"
        self._where = options.get("where") or "prompt"
        self._freeze = options.get("freeze", BRANCHES)
        self._steering = list(interventions_of(options.get("steering")))
        self._align: Align = options.get("align", "identity")
        self._at: tuple[int, ...] = ()
        self._answer: list[int] = []
        self._foil: list[int] = []
        self._length = 0
        self.frozen: tuple[Site, ...] = ()

    def probe(self) -> list[Intervention]:
        """Steering whose explanation says where the senders' rows are exchanged."""
        point, layer = self.senders[0]
        return [replace(Zeros()).at(points=point, layers=layer, where=self._where)]

    def resolve(self, explanation: Explanation, layers: int) -> None:
        """Take what the server says about `probe`, and the number of the model's layers."""
        (selection,) = (
            intervention.selection
            for intervention in explanation.interventions
            if intervention.origin == "request"
        )
        self._at = tuple(position for run in selection.positions for position in run)
        self._length = len(explanation.prompt_token_ids)
        first = _order(self.senders[0])
        last = _order(self.receivers[-1]) if self.receivers else (layers, 0)
        frozen = _frozen(self._freeze, layers)
        self.frozen = tuple(site for site in frozen if first < _order(site) < last)

    def captures(
        self, runs: Sequence[str]
    ) -> Iterator[tuple[Prompt, tuple[list[Point], list[int]], list[Intervention]]]:
        """The runs to capture: prompt, points and layers, steering.

        ``runs`` are the ids of the runs so far, which the caller extends.
        """
        yield self.source, _grid(self.senders), self._steering
        if self.frozen:
            yield self.base, _grid(self.frozen), self._steering
        for receiver in self.receivers:
            yield self.base, _grid([receiver]), self._send(runs, receiver)

    def reads(self, runs: Sequence[str]) -> Iterator[tuple[Prompt, list[Intervention]]]:
        """The runs to grade: the base prompt, the source prompt, and the base with the paths."""
        yield self.base, self._steering
        yield self.source, self._steering
        if not self.receivers:
            yield self.base, self._send(runs)
            return
        put = list(self._steering)
        given = runs[-len(self.receivers) :]
        for site, run in zip(self.receivers, given, strict=True):
            put += _put(from_run(run), [site], self._receiver_where)
        yield self.base, put

    def _send(self, runs: Sequence[str], receiver: Site | None = None) -> list[Intervention]:
        """The steering of the pass for a receiver, or for the logits."""
        end = (math.inf, 0) if receiver is None else _order(receiver)
        senders = [site for site in self.senders if _order(site) < end]
        frozen = [site for site in self.frozen if _order(site) < end]
        put = list(self._steering)
        put += _put(from_run(runs[0], align=self._align), senders, positions(*self._at))
        rest = set(range(self._at[0], self._length))
        for sites, at in (
            ([site for site in frozen if site not in senders], rest),
            ([site for site in frozen if site in senders], rest.difference(self._at)),
        ):
            if sites and at:
                put += _put(from_run(runs[1]), sites, positions(*at))
        return put

    def ask(self, tokens: Mapping[str, TokenIds]) -> list[int]:
        """The tokens whose log-probabilities grade a pass; `tokens` are those of `answer_texts`.

        Raises InvalidRequest for an answer of several tokens.
        """
        found: list[list[int]] = []
        for name, answer in (("answer", self.pair.answer), ("foil", self.pair.foil)):
            alternatives = answer_ids(answer, tokens, f"pair.{name}")
            for ids in alternatives:
                if len(ids) > 1:
                    raise invalid(
                        f"pair.{name}",
                        f"paths are graded by the next token, but an answer has {len(ids)} tokens: "
                        "give its first token's id, as (id,)",
                    )
            found.append([ids[0] for ids in alternatives])
        self._answer, self._foil = found
        return sorted({*self._answer, *self._foil})

    def result(self, base: LensResult, source: LensResult, patched: LensResult) -> PathPatch:
        """The result: what the lens reads after the last layer at the prompts' last tokens."""
        return PathPatch(
            self.senders,
            self.receivers,
            self.frozen,
            "logit_difference" if self._foil else "logprob",
            *(self._grade(read) for read in (base, source, patched)),
        )

    def _grade(self, read: LensResult) -> float:
        logprobs = dict(zip(read.token_ids, read.logprobs[-1, -1].tolist(), strict=True))
        answer = _log_sum([logprobs[token] for token in self._answer])
        return answer - _log_sum([logprobs[token] for token in self._foil])


def _log_sum(logprobs: Sequence[float]) -> float:
    return float(np.logaddexp.reduce(logprobs)) if logprobs else 0.0


def _put(rows: FromRun, sites: Sequence[Site], where: SelectorLike) -> list[Intervention]:
    """One replacement for all layers of a point."""
    return [
        replace(rows).at(points=point, layers=layers, where=where)
        for point in BRANCHES
        if (layers := [site.layer for site in sites if site.point is point])
    ]


def _grid(sites: Sequence[Site]) -> tuple[list[Point], list[int]]:
    """Points and layers whose combinations have these sites."""
    points = [point for point in BRANCHES if any(site.point is point for site in sites)]
    return points, sorted({site.layer for site in sites})


def _order(site: Site) -> tuple[float, int]:
    return site.layer, BRANCHES.index(site.point)


def _branches(given: Branches, path: str) -> tuple[Site, ...]:
    """The branches in the order of the forward pass."""
    if isinstance(given, str):
        raise invalid(path, _advice(given, path))
    single = isinstance(given, tuple) and len(given) > 0 and isinstance(given[0], str)
    sites = [_branch(branch, path) for branch in ([given] if single else given)]
    if not sites:
        raise invalid(path, "at least one branch is required", "REASON_MISSING_FIELD")
    if len(set(sites)) < len(sites):
        raise invalid(path, "a branch is named twice")
    return tuple(sorted(sites, key=_order))


def _branch(given: object, path: str) -> Site:
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise invalid(path, f'a branch is (point, layer), as ("attn_out", 3), not {given!r:.60}')
    name = given[0]
    if len(given) == 3 or names_head(name):
        raise invalid(path, f"{given!r:.60}: {NO_HEADS}", "REASON_NOT_SUPPORTED")
    point = point_of(name)
    if point not in BRANCHES:
        raise invalid(
            path,
            f"{point} is the stream or no branch of it: paths go between attn_out and mlp_out. To "
            "patch the stream itself, use engine.sweep",
            "REASON_NOT_SUPPORTED",
        )
    return Site(point, whole_number(given[1], path, "a layer"))


def _advice(given: str, path: str) -> str:
    word = ' or "logits"' if path == "receiver" else ""
    return f'a branch is (point, layer), as ("attn_out", 3){word}, not {given!r}'


def _frozen(given: Freeze, layers: int) -> tuple[Site, ...]:
    """The branches to freeze, of which those between senders and receivers count."""
    several = [given] if isinstance(given, str) else list(given)
    branches: list[Branch] = []
    for branch in several:
        if not isinstance(branch, str):
            branches.append(branch)
        elif names_head(branch):
            raise invalid("freeze", f"{branch!r}: {NO_HEADS}", "REASON_NOT_SUPPORTED")
        else:
            branches += [(branch, layer) for layer in range(layers)]
    return _branches(branches, "freeze") if branches else ()
