"""The demo model's facts as pairs of prompts, and what sweeps find in them."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tools.demo_model.facts import LANDMARKS, RELATIONS, Relation
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rheostat

from .conftest import MODEL

Grid = npt.NDArray[np.float64]

POINTS = ("resid_post", "mlp_out", "attn_out")
GROUPS = ("subject's first", "subject's last", "between", "last")
"""Groups of positions of a fact's prompt."""
ZOOMS = {
    "resid_post": rheostat.Zoom(
        layer_stride=3, column_stride=8, layer_radius=1, column_radius=0, peak_count=2
    ),
    "mlp_out": rheostat.Zoom(
        layer_stride=4, column_stride=8, layer_radius=0, column_radius=1, peak_count=3
    ),
    "attn_out": rheostat.Zoom(
        layer_stride=5, column_stride=8, layer_radius=2, column_radius=0, peak_count=3
    ),
}
"""How each point is zoomed on: at most a quarter of a grid of 6 layers and 5 to 9 positions."""


class Fact(NamedTuple):
    """A relation and the subject that the prompt names."""

    relation: Relation
    subject: str

    @property
    def prompt(self) -> str:
        """The text that ends right before the answer."""
        return self.relation.prompt(0, self.subject)

    @property
    def answer(self) -> str:
        """The next token."""
        return f" {self.relation.answers[self.subject]}"

    def groups(self) -> dict[str, rheostat.Selector] | None:
        """The positions of `GROUPS`; None if one would be empty."""
        encoded = tokenizer()(self.prompt, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        start = self.prompt.lower().index(self.subject.lower())
        end = start + len(self.subject)
        *first, last = [
            number for number, (a, b) in enumerate(offsets) if a < b and start < b and a < end
        ]
        final = len(offsets) - 1
        places = (first, [last], range(last + 1, final), [final])
        if not all(places):
            return None
        return {
            name: rheostat.positions(*place) for name, place in zip(GROUPS, places, strict=True)
        }

    def noisy(self, count: int) -> rheostat.Pair:
        """Meng et al.'s causal trace: noise on the subject's embeddings."""
        noise = rheostat.Noise(embedding_std=3, seed=0)
        groups = self.groups()
        assert groups is not None
        subject = groups[GROUPS[0]] | groups[GROUPS[1]]
        noisy = rheostat.NoisyPrompt(noise, where=subject, count=count)
        return rheostat.Pair(self.prompt, corrupt=noisy, answer=self.answer, groups=groups)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's."""
    found = AutoTokenizer.from_pretrained(MODEL)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


def facts(relations: Sequence[Relation] = RELATIONS) -> list[Fact]:
    """All facts in their first wording."""
    return [Fact(relation, subject) for relation in relations for subject in relation.answers]


def traced() -> list[Fact]:
    """The facts whose prompt has tokens in all `GROUPS`."""
    return [fact for fact in facts() if fact.groups() is not None]


def swapped(fact: Fact) -> rheostat.Pair | None:
    """A fact beside one of equal length with another answer, if there is one."""
    subjects = list(fact.relation.answers)
    place = subjects.index(fact.subject)
    length = len(tokenizer()(fact.prompt)["input_ids"])
    for other in subjects[place + 1 :] + subjects[:place]:
        twin = Fact(fact.relation, other)
        if twin.answer != fact.answer and len(tokenizer()(twin.prompt)["input_ids"]) == length:
            return rheostat.Pair(
                fact.prompt, corrupt=twin.prompt, answer=fact.answer, foil=twin.answer
            )
    return None


def landmarks(count: int) -> list[rheostat.Pair]:
    """Landmarks with `GROUPS`."""
    pairs = []
    for fact in facts([LANDMARKS]):
        pair, groups = swapped(fact), fact.groups()
        if pair is not None and groups is not None:
            named = rheostat.Pair(
                pair.prompt, corrupt=pair.corrupt, answer=pair.answer, foil=pair.foil, groups=groups
            )
            pairs.append(named)
    return pairs[:count]


class Zoomed(NamedTuple):
    """A fact, swept whole and with zoom."""

    prompt: str
    point: str
    cells: int
    """Of the whole grid."""
    ran: int
    """With zoom."""
    top: int
    """The cell with the largest effect."""
    found: int
    """The same with zoom."""
    short: float
    """By how much the effect of the cell that was found is smaller."""
    noise: float
    """Largest deviation of an unchanged prompt in both sweeps together."""

    @property
    def right(self) -> bool:
        """Whether zoom found the top cell, or a cell that is as high within the noise."""
        return self.short <= self.noise + 1e-6


def zoomed(engine: rheostat.Engine, pair: rheostat.Pair, point: str) -> Zoomed:
    """Sweeps a fact whole and with zoom."""
    options = {"points": point, "grades": "recovered logit_difference", "watch": False}
    whole, part = engine.sweep(pair, **options), engine.sweep(pair, **options, zoom=ZOOMS[point])
    effects, partial = (np.abs(one.array() - one.base()).ravel() for one in (whole, part))
    top, found = int(np.nanargmax(effects)), int(np.nanargmax(partial))
    return Zoomed(
        str(pair.prompt),
        point,
        cells=effects.size,
        ran=int((~np.isnan(partial)).sum()),
        top=top,
        found=found,
        short=float(effects[top] - effects[found]),
        noise=whole.noise[0].largest + part.noise[0].largest,
    )


def trace(
    engine: rheostat.Engine, chosen: Sequence[Fact], window: int, noises: int
) -> rheostat.SweepResult:
    """Meng et al.'s causal trace of some facts: p(answer) with clean rows put in."""
    return engine.sweep(
        [fact.noisy(noises) for fact in chosen],
        points=list(POINTS),
        window=window,
        grades="probability",
        watch=False,
    )


def by_point(result: rheostat.SweepResult) -> dict[str, Grid]:
    """For each point, how much p(answer) rises in each cell: [layers, groups]."""
    rises = result.array() - result.base()
    rows = np.array([site.point.value for site in result.sites])
    return {str(point): rises[rows == point] for point in POINTS}
