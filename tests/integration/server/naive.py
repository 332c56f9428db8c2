"""Steering twice over: as the client says it, and as its formula does it to rows in float64.

`compare` runs what a request computed through Hugging Face's model under hooks that know nothing of
ours but the formulas of the wire's comments.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import rheostat
import rheostat_engine
from rheostat import Point, Site

from ..engine.reference import Change, HfReference, Run

WIDTH = 128
TOLERANCE = 1e-4
"""Of log-probabilities, in nats. Two float32 implementations of the bundled model differ by 3e-6 at
most; a token that is steered at the wrong position, or read from a block that was computed under
other steering, differs by more than 1e-3."""
Row = npt.NDArray[np.float32]
Formula = Callable[[torch.Tensor], torch.Tensor]
Where = Callable[[int, int, int], bool]


def row(seed: int) -> Row:
    """A random vector, [1, W]."""
    return np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)


class Op(NamedTuple):
    """One op."""

    does: rheostat.Intervention
    """Without sites."""
    formula: Formula
    """From rows [n, W] to rows [n, W]."""
    acts_last: bool = False
    """Whether it acts after all others at its site, and selects no tokens by their ids."""
    rows: Row | None = None
    """[positions, W]: what replaces the row of each position, in place of the formula."""

    def at(self, positions: Sequence[int]) -> Formula:
        """What it does to the rows of these positions."""
        rows = self.rows
        if rows is None:
            return self.formula
        return lambda x: torch.from_numpy(rows[list(positions)]).double()


def _tensor(vector: Row) -> torch.Tensor:
    return torch.from_numpy(vector[0]).double()


def _unit(vector: Row) -> torch.Tensor:
    return _tensor(vector) / _tensor(vector).norm()


def add(vector: Row, scale: float) -> Op:
    """x + scale * v."""
    return Op(rheostat.inline(vector) * scale, lambda x: x + scale * _tensor(vector))


def norm_add(vector: Row, scale: float) -> Op:
    """x + scale * |x| * u."""
    return Op(
        rheostat.norm_add(rheostat.inline(vector), scale),
        lambda x: x + scale * x.norm(dim=1, keepdim=True) * _unit(vector),
    )


def ablate(vectors: Sequence[Row], strength: float) -> Op:
    """x - strength * (projection of x on the span)."""
    span = torch.stack([_tensor(one) for one in vectors])
    onto = span.T @ torch.linalg.inv(span @ span.T) @ span
    ours = rheostat.ablate(*map(rheostat.inline, vectors), strength=strength)
    return Op(ours, lambda x: x - strength * (x @ onto))


def clamp(bands: Sequence[tuple[Row, float | None, float | None, float]]) -> Op:
    """For each (v, min, max, strength): x + strength * (clip(x.u, min, max) - x.u) * u."""

    def formula(x: torch.Tensor) -> torch.Tensor:
        for vector, low, high, strength in bands:
            along = x @ _unit(vector)
            x = x + strength * torch.outer(along.clamp(low, high) - along, _unit(vector))
        return x

    ours = [rheostat.band(rheostat.inline(v), low, high, s) for v, low, high, s in bands]
    return Op(rheostat.clamp(*ours), formula)


def scale(vector: Row, factor: float) -> Op:
    """x + (factor - 1) * (x.u) * u."""

    def formula(x: torch.Tensor) -> torch.Tensor:
        unit = _unit(vector)
        return x + (factor - 1) * torch.outer(x @ unit, unit)

    return Op(rheostat.scale(rheostat.inline(vector), factor), formula)


def replace(vector: Row, alpha: float) -> Op:
    """(1 - alpha) * x + alpha * v."""
    return Op(
        rheostat.replace(rheostat.inline(vector), alpha=alpha),
        lambda x: (1 - alpha) * x + alpha * _tensor(vector),
        acts_last=True,
    )


STORED = np.random.default_rng(9).normal(size=(512, WIDTH)).astype(np.float32)
"""Rows of the run "stored": of each position, at every site of it."""


def put_stored(engine: rheostat.Engine, layers: Sequence[int]) -> None:
    """Uploads the run "stored" with `resid_post` of some layers."""
    rows = {("resid_post", layer): STORED for layer in layers}
    count = len(STORED)
    ids = {"prompt_token_ids": [5] * 4, "token_ids": [5] * count}
    engine.put_run(rows, run_id="stored", positions=range(count), **ids)


def replace_by_run() -> Op:
    """The rows of the run "stored", each in the place of the row at its position."""
    return Op(rheostat.replace(rheostat.from_run("stored")), _none, acts_last=True, rows=STORED)


def replace_by_rows(positions: Sequence[int], sites: int) -> Op:
    """The same rows of some positions, which the request sends, at `sites` sites."""
    array = np.stack([STORED[list(positions)]] * sites)
    return Op(rheostat.replace(array), _none, acts_last=True, rows=STORED)


def _none(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the rows depend on their positions")


OPS: dict[str, Op] = {
    "add": add(row(0), 0.7),
    "norm_add": norm_add(row(1), -0.4),
    "ablate": ablate([row(2)], 1.0),
    "ablate-three": ablate([row(2), row(3), row(2) + 0.3 * row(4)], 0.6),
    "clamp-pin": clamp([(row(5), 3.0, 3.0, 1.0)]),
    "clamp-bands": clamp([(row(5), -0.5, 0.5, 0.8), (row(6), 0.2, None, 1.0)]),
    "scale": scale(row(7), -1.5),
    "replace": replace(row(8), 0.4),
}
"""Every op that is served, in more than one form where it has several."""

BY_TOKEN = {name: op for name, op in OPS.items() if not op.acts_last}
"""Every op that may select tokens by their ids."""


POINTS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


def number_of(site: Site) -> int:
    """A site in the reference's numbers."""
    return rheostat_engine.Site(rheostat_engine.Point(site.point), site.layer).index


class Placed(NamedTuple):
    """An op at places."""

    op: Op
    layers: Sequence[int]
    """Where: the points of each."""
    where: rheostat.Selector | str
    """Which tokens, as the client says it."""
    holds: Where
    """The same said of a position, its token, and the prompt's length."""
    points: Sequence[str] = ("resid_post",)
    """Where in a layer."""

    @property
    def ours(self) -> rheostat.Intervention:
        """For the client."""
        return self.op.does.at(points=self.points, layers=list(self.layers), where=self.where)

    @property
    def sites(self) -> list[Site]:
        """Where, as the receipt says it."""
        return [Site(Point(point), layer) for layer in self.layers for point in self.points]


def everywhere(op: Op, layers: Sequence[int], points: Sequence[str] = ("resid_post",)) -> Placed:
    """An op on every token."""
    where = rheostat.window() | rheostat.generated() if op.acts_last else "all"
    return Placed(op, layers, where, lambda position, token, length: True, points)


class Moved(NamedTuple):
    """What a hook did at a site."""

    positions: list[int]
    norms: npt.NDArray[np.float64]
    """|change| of each row."""
    relative: npt.NDArray[np.float64]
    """|change| / |x|."""


class Expected(NamedTuple):
    """What Hugging Face's model computes."""

    run: Run
    moved: list[dict[Site, Moved]]
    """By op, then site."""


def expected(
    reference: HfReference, prompt: Sequence[int], made: Sequence[int], placed: Sequence[Placed]
) -> Expected:
    """One pass over all that was an input: the last generated token was none."""
    tokens = [*prompt, *made][:-1]
    moved: list[dict[Site, Moved]] = [{} for _ in placed]
    hooks = []
    for number, one in sorted(enumerate(placed), key=lambda each: each[1].op.acts_last):
        positions = [p for p, token in enumerate(tokens) if one.holds(p, token, len(prompt))]
        for site in one.sites if positions else ():
            change = _watched(one.op.at(positions), moved[number], site, positions)
            hooks.append(Change(number_of(site), change, positions))
    return Expected(reference.run(tokens, hooks), moved)


def compare(
    reference: HfReference,
    out: rheostat.Generation,
    placed: Sequence[Placed],
) -> list[Expected]:
    """Every sample's log-probabilities are those of the hooks; the request asked for them."""
    found = []
    for sample in out.samples:
        one = expected(reference, out.prompt_token_ids, sample.token_ids, placed)
        first = len(out.prompt_token_ids) - 1
        want = [one.run.logprobs[first + i][t] for i, t in enumerate(sample.token_ids)]
        got = [step.token.logprob for step in sample.logprobs]
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
        found.append(one)
    return found


def positions_of(runs: Sequence[range]) -> list[int]:
    """Positions of a receipt or an explanation, one by one."""
    return [position for run in runs for position in run]


def _watched(
    formula: Formula, moved: dict[Site, Moved], site: Site, positions: list[int]
) -> Formula:
    def change(x: torch.Tensor) -> torch.Tensor:
        before = x.double()
        after = formula(before)
        norms = (after - before).norm(dim=1)
        relative = norms / before.norm(dim=1)
        moved[site] = Moved(positions, norms.numpy(), relative.numpy())
        return after.to(x.dtype)

    return change
