"""A causal trace of a fact: one sweep over the layers and positions of two prompts.

Clean and corrupt prompt differ only in the subject. Each cell replaces one row of the corrupt
prompt by the clean prompt's row, and shows how much of the logit difference of the two answers
this restores: 0 nothing, 1 all. docs/causal-tracing.md explains how to read the grid.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from rheostat import aio
from rheostat._capture.captures import Capture
from rheostat._cli._common import CommandError, writing
from rheostat._points import Point
from rheostat._responses.model import ModelInfo
from rheostat._responses.results import Generation
from rheostat._sweeps.pairs import Pair
from rheostat._sweeps.progress import OnProgress
from rheostat._sweeps.result import SweepResult

SENTENCE = "The {} is in the city of"
SUBJECT = "Eiffel Tower"
OTHERS = (
    "Willis Tower", "Galata Tower", "Belem Tower", "Skytree Tower", "Space Needle", "Opera House",
    "Prado Museum", "Pergamon Museum", "Charles Bridge", "Trevi Fountain", "Brandenburg Gate",
    "Golden Pavilion", "Forbidden City", "Blue Mosque", "Red Fort",
)  # fmt: skip
"""Corrupt subjects. The first with as many tokens and another answer is used."""
_STREAM = (Point.RESID_PRE, Point.RESID_MID, Point.RESID_POST)
_DOTS_PER_INCH = 150
_LEAST_PEAK = 1 / 3
"""A position carries the fact if a row recovers at least this part of the logit difference."""


class Fact(NamedTuple):
    """Two prompts of equal length in tokens, and the next token of each."""

    clean: str
    corrupt: str
    clean_run: Generation
    """With the stream of every layer."""
    corrupt_run: Generation

    @property
    def answers(self) -> tuple[str, str]:
        """The next token of the clean and of the corrupt prompt, as text."""
        return self.clean_run.text.strip(), self.corrupt_run.text.strip()

    @property
    def pair(self) -> Pair:
        """The prompts and answers of a sweep."""
        return Pair(
            self.clean,
            corrupt=self.corrupt,
            answer=self.clean_run.token_ids,
            foil=self.corrupt_run.token_ids,
        )


async def find_fact(engine: aio.Engine, model: ModelInfo) -> Fact:
    """Run a clean and a corrupt prompt, and capture the clean one's stream at every layer.

    Raises CommandError if no subject gives a pair.
    """
    points = [point for point in _STREAM if len(model.captured(point)) == model.layer_count]
    if Point.RESID_POST not in points:
        raise CommandError("the trace needs resid_post at every layer, which this model lacks")
    clean = SENTENCE.format(SUBJECT)
    clean_run = await engine.generate(
        clean, capture=Capture(points, "all", where="prompt"), max_tokens=1, temperature=0
    )
    for other_subject in OTHERS:
        corrupt = SENTENCE.format(other_subject)
        token_ids = (await engine.tokenize(corrupt)).token_ids
        if len(token_ids) != len(clean_run.prompt_token_ids):
            continue
        corrupt_run = await engine.generate(corrupt, max_tokens=1, temperature=0)
        if corrupt_run.token_ids != clean_run.token_ids:
            return Fact(clean, corrupt, clean_run, corrupt_run)
    raise CommandError("no other subject of equal length changes the model's answer")


async def trace(engine: aio.Engine, fact: Fact, progress: OnProgress) -> SweepResult:
    """Grade every cell. ``progress`` is called with (cells done, cells in all)."""
    return await engine.sweep(
        fact.pair, grades="recovered logit_difference", progress=progress, watch=False
    )


def draw(result: SweepResult, fact: Fact, model: str, path: Path) -> None:
    """Write the heatmap of a trace of ``model``. The suffix of the file chooses the format."""
    figure = result.heatmap()
    clean, corrupt = fact.answers
    figure.suptitle(f'Which row makes {model} say "{clean}"?', fontsize=12, fontweight="bold")
    figure.axes[0].set_title(
        f'Prompts: "{fact.clean}" ({clean}) and\n"{fact.corrupt}" ({corrupt}). '
        f"Each cell: the second prompt,\nwith one row of the first. 1: {clean} is as likely as "
        f"there; 0: nothing changes.",
        fontsize=9,
    )
    try:
        with writing(path) as temporary:
            figure.savefig(temporary, dpi=_DOTS_PER_INCH)
    except ValueError as error:
        raise CommandError(f"cannot write {path}: {error}") from error


def peaks(result: SweepResult) -> list[str]:
    """One line for each position that carries the fact: the layers and how much they recover."""
    lines = []
    for label, column in zip(result.labels, np.nan_to_num(result.array()).T, strict=True):
        best = int(column.argmax())
        if column[best] < _LEAST_PEAK:
            continue
        strong = np.flatnonzero(column >= column[best] / 2)
        first, last = result.sites[strong[0]], result.sites[strong[-1]]
        lines.append(
            f"{label}: {column[best]:.2f} at {result.sites[best]}, "
            f"at least half of it from {first} to {last}"
        )
    return lines
