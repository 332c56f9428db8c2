"""A causal trace of a fact by patching, one request per (site, position).

Clean and corrupted prompt differ only in the subject. Each request replaces one row of the
corrupted run by the clean run's row. The score of a run is
ln p(clean answer) - ln p(corrupt answer). The grade of a cell is the recovered fraction of the
score difference between the two runs: 0 nothing, 1 all. Method: causal tracing (Meng et al., 2022),
with interchanged rows (Vig et al., 2020).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rheostat import aio
from rheostat._capture.captures import Capture
from rheostat._cli._common import CommandError
from rheostat._points import Point, Site
from rheostat._responses.model import ModelInfo
from rheostat._responses.results import Generation
from rheostat._selectors import positions
from rheostat._steering.replacements import Replace, replace
from rheostat_wire.dtypes import FloatArray

SENTENCE = "The {} is in the city of"
SUBJECT = "Eiffel Tower"
OTHERS = (
    "Willis Tower", "Galata Tower", "Belem Tower", "Skytree Tower", "Space Needle", "Opera House",
    "Prado Museum", "Pergamon Museum", "Charles Bridge", "Trevi Fountain", "Brandenburg Gate",
    "Golden Pavilion", "Forbidden City", "Blue Mosque", "Red Fort",
)  # fmt: skip
"""Corrupted subjects. The first with as many tokens and another answer is used."""
_MOST_LOGPROBS = 256
_STREAM = (Point.RESID_PRE, Point.RESID_MID, Point.RESID_POST)


class Pair(NamedTuple):
    """Two prompts of equal length in tokens, and their runs."""

    clean: str
    corrupt: str
    answers: tuple[str, str]
    """The next token of the clean and of the corrupted run, as text."""
    pieces: tuple[str, ...]
    """The texts of the clean prompt's tokens; "clean/corrupt" at positions that differ."""
    clean_run: Generation
    corrupt_run: Generation

    @property
    def answer_ids(self) -> tuple[int, int]:
        """The tokens of `answers`."""
        return self.clean_run.token_ids[0], self.corrupt_run.token_ids[0]

    @property
    def changed(self) -> list[int]:
        """Positions at which the prompts differ."""
        both = zip(self.clean_run.prompt_token_ids, self.corrupt_run.prompt_token_ids, strict=True)
        return [number for number, (clean, corrupt) in enumerate(both) if clean != corrupt]


class Trace(NamedTuple):
    """The grades of all cells."""

    pair: Pair
    sites: tuple[Site, ...]
    recovered: FloatArray
    """[sites, positions]."""
    bounded: int
    """Number of cells whose grade is a bound, because an answer has no log-probability."""


def logprobs_for(model: ModelInfo) -> int:
    """A number of log-probabilities that probably includes both answers."""
    return min(model.limits.logprobs, model.vocabulary_size, _MOST_LOGPROBS)


async def find_pair(engine: aio.Engine, model: ModelInfo) -> Pair:
    """Run a clean and a corrupted prompt, and capture the stream at every layer.

    Raises CommandError if no subject gives a pair.
    """
    points = [point for point in _STREAM if len(model.captured(point)) == model.layer_count]
    if Point.RESID_POST not in points:
        raise CommandError("the trace needs resid_post at every layer, which this model lacks")

    async def run(prompt: str) -> Generation:
        return await engine.generate(
            prompt,
            capture=Capture(points, "all", where="prompt"),
            max_tokens=1,
            temperature=0,
            logprobs=logprobs_for(model),
        )

    clean = SENTENCE.format(SUBJECT)
    clean_run = await run(clean)
    clean_tokens = await engine.tokenize(clean)
    for other_subject in OTHERS:
        corrupt = SENTENCE.format(other_subject)
        tokens = await engine.tokenize(corrupt)
        if len(tokens.token_ids) != len(clean_tokens.token_ids):
            continue
        corrupt_run = await run(corrupt)
        if corrupt_run.token_ids == clean_run.token_ids:
            continue
        pieces = tuple(
            (clean_piece or "<start>")
            if clean_piece == corrupt_piece
            else f"{clean_piece}/{corrupt_piece.strip()}"
            for clean_piece, corrupt_piece in zip(clean_tokens.pieces, tokens.pieces, strict=True)
        )
        answers = (clean_run.text.strip(), corrupt_run.text.strip())
        return Pair(clean, corrupt, answers, pieces, clean_run, corrupt_run)
    raise CommandError("no other subject of equal length changes the model's answer")


def sites_of(pair: Pair, model: ModelInfo) -> tuple[Site, ...]:
    """The stream that enters layer 0, if captured, and the stream that leaves each layer."""
    first = Site(Point.RESID_PRE, 0)
    entry = (first,) if first in pair.clean_run.activations else ()
    return entry + tuple(Site(Point.RESID_POST, layer) for layer in range(model.layer_count))


async def trace(
    engine: aio.Engine,
    model: ModelInfo,
    pair: Pair,
    limit: asyncio.Semaphore,
    finished: Callable[[int, int], None],
) -> Trace:
    """Grade every cell. ``finished`` is called with (cells done, cells in all)."""
    sites = sites_of(pair, model)
    length = len(pair.pieces)
    grades = np.zeros((len(sites), length), np.float32)
    clean_score, _ = _score(pair.clean_run, pair)
    corrupt_score, _ = _score(pair.corrupt_run, pair)
    bounds = done = 0

    async def cell(row: int, position: int) -> None:
        nonlocal bounds, done
        async with limit:
            out = await engine.generate(
                pair.corrupt_run.prompt_token_ids,
                steering=_patch(pair, sites[row], position),
                max_tokens=1,
                temperature=0,
                logprobs=logprobs_for(model),
            )
        score, bounded = _score(out, pair)
        grades[row, position] = (score - corrupt_score) / (clean_score - corrupt_score)
        bounds += bounded
        done += 1
        finished(done, grades.size)

    await asyncio.gather(*(cell(row, at) for row in range(len(sites)) for at in range(length)))
    return Trace(pair, sites, grades, bounds)


def _patch(pair: Pair, site: Site, position: int) -> Replace:
    """Puts a row of the clean run into the corrupted one."""
    row = pair.clean_run.activations[site.point, site.layer][position]
    return replace(row[None, None]).at(
        points=site.point, layers=site.layer, where=positions(position)
    )


def _score(out: Generation, pair: Pair) -> tuple[float, bool]:
    """ln p(clean answer) - ln p(corrupt answer), and whether one of them is a bound."""
    at = out.logprobs[0]
    least = min(token.logprob for token in (at.token, *at.alternatives))
    clean, corrupt = (at.of(answer) for answer in pair.answer_ids)
    score = (least if clean is None else clean) - (least if corrupt is None else corrupt)
    return score, clean is None or corrupt is None


def peaks(result: Trace) -> list[str]:
    """One line per position that carries at least a third of the answer somewhere."""
    lines = []
    for position, token in enumerate(result.pair.pieces):
        column = result.recovered[:, position]
        best = int(column.argmax())
        if column[best] < 1 / 3:
            continue
        strong = np.flatnonzero(column >= column[best] / 2)
        first, last = result.sites[strong[0]], result.sites[strong[-1]]
        lines.append(
            f"{position} {token.strip()!r}: {column[best]:.2f} at "
            f"{result.sites[best]}, at least half of it from {first} to {last}"
        )
    return lines
