"""What acts do to one token at one site, step by step and row by row in float64."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Act, Activation, Band, Kind, Normalise, Plan, Readout
from rheostat_engine.plan.composition import Program

from .strategies import LAST, selects

Row = npt.NDArray[np.float64]
Vectors = Mapping[bytes, npt.NDArray[np.float32]]
Steps = tuple[object, ...]
"""Of adjacent additions, how often each is made; of another act, one entry per direction."""


def acting(plan: Plan, site: int, position: int, token: int) -> list[tuple[int, Act]]:
    """The acts that may change a token at a site, with their indices, in the order of acting."""
    found = [
        (index, act)
        for index, act in enumerate(plan.acts)
        if act.acts and site in dict(act.rows) and selects(act, position, token)
    ]
    return sorted(found, key=lambda pair: pair[1].kind in LAST)


def steps(plan: Plan, site: int, position: int, token: int) -> Steps:
    """What is to be done at a site."""
    found: list[object] = []
    for _, act in acting(plan, site, position, token):
        rows = dict(act.rows)[site]
        parts = list(zip(act.vectors, rows, strict=True))
        if act.kind is Kind.ADD:
            one = (act.vectors[0], rows[0], act.scale)
            if found and isinstance(found[-1], Counter):
                found[-1][one] += 1
            else:
                found.append(Counter([one]))
        elif act.kind is Kind.NORM_ADD:
            found.append((parts, act.scale))
        elif act.kind in LAST:
            found.append((act.kind, *parts, act.scale))
        else:
            for at, band in banded(act):
                read, write = parts[0 if act.orthogonal else at : at + 1], parts[at + 1 : at + 2]
                bounds = band.low, band.high, band.strength
                write = write if band.writes else []
                found.append((read, *bounds, band.readout, write, band.only_on))
    return tuple(found)


def described(program: Program) -> Steps:
    """A program in the words of `steps`."""
    found: list[object] = []
    for step in program:
        if step.kind is Kind.ADD:
            found.append(Counter(step.addends))
        elif step.kind is Kind.NORM_ADD:
            found.append((list(step.direction), step.strength))
        elif step.kind in LAST:
            rows = [(digest, row) for ((digest, row, _),) in step.rows]
            found.append((step.kind, *rows, step.strength))
        else:
            bounds = step.low, step.high, step.strength
            write = list(step.write)
            found.append((list(step.direction), *bounds, step.readout, write, step.only_on))
    return tuple(found)


class Changed(NamedTuple):
    """A row after all acts, and what each of them did to it."""

    row: Row
    doses: dict[int, tuple[float, float]]
    """By act: |change| and |change| / |x|."""


def change(
    plan: Plan, site: int, position: int, token: int, stream: npt.ArrayLike, vectors: Vectors
) -> Changed:
    """One act after the other; adjacent additions are measured against the same row."""
    row = np.asarray(stream, np.float64)
    doses = {}
    norm, adding = 0.0, False
    for index, act in acting(plan, site, position, token):
        rows = dict(act.rows)[site]
        if act.kind is not Kind.ADD or not adding:
            norm = float(np.linalg.norm(row))
        adding = act.kind is Kind.ADD
        before = row
        row = applied(act, row, rows, vectors)
        moved = float(np.linalg.norm(row - before))
        doses[index] = (moved, moved / norm)
    return Changed(row, doses)


def units(parts: list[Row], *, orthogonal: bool) -> list[Row]:
    """Unit vectors along some vectors, each orthogonal to those before it or not."""
    if not orthogonal:
        return [part / np.linalg.norm(part) for part in parts]
    q, r = np.linalg.qr(np.stack(parts, axis=1))
    return list((q * np.sign(np.diag(r))).T)


def applied(
    act: Act, row: Row, rows: tuple[int, ...], vectors: Vectors, weight: float = 1.0
) -> Row:
    """A row after an act with some rows of its vectors, `weight` times as strong."""
    parts = [vectors[d][r].astype(np.float64) for d, r in zip(act.vectors, rows, strict=True)]
    scale = weight * act.scale
    if act.kind is Kind.ADD:
        return row + scale * parts[0]
    if act.kind is Kind.NORM_ADD:
        return row + scale * np.linalg.norm(row) * units(parts, orthogonal=False)[0]
    if act.kind in LAST:
        mask = parts[1] if len(parts) > 1 else 1.0
        return row + scale * mask * (parts[0] - row * (act.kind is Kind.REPLACE))
    along = units(parts, orthogonal=act.orthogonal)
    for at, band in banded(act):
        number = read(band.readout, row, along[at], float(np.linalg.norm(parts[at])))
        if band.only_on and number == 0:
            continue
        write = along[at]
        if band.writes:
            write = parts[at + 1]
        elif band.readout.normalise is Normalise.NONE:
            write = parts[at] / (parts[at] @ parts[at])
        strength = weight * band.strength
        row = row + strength * (np.clip(number, band.low, band.high) - number) * write
    return row


def banded(act: Act) -> Iterator[tuple[int, Band]]:
    """The bands of an act, each with the index of the vector that it reads with."""
    at = 0
    for band in act.bands:
        yield at, band
        at += band.vectors


def projected_cosine(x: Row, c: Row) -> float:
    """The cosine of x and of its projection on c, whose elements pass through tanh.

    As `leash_layer.py` of IBM's activation-steering computes it (Lee et al., 2024).
    """
    projected = np.tanh(np.outer(c, c) @ x / (c @ c))
    norm = np.linalg.norm(x) * np.linalg.norm(projected)
    return float(x @ projected / norm) if norm else 0.0


def read(readout: Readout, row: Row, unit: Row, norm: float) -> float:
    """What a readout makes of a row and a vector of a norm along `unit`."""
    number = float(row @ unit)
    if readout.normalise is Normalise.NONE:
        number *= norm
    elif readout.normalise is Normalise.COSINE:
        number = number / float(np.linalg.norm(row)) if row.any() else 0.0
    elif readout.normalise is Normalise.PROJECTED_COSINE:
        number = projected_cosine(row, unit)
    number += readout.bias
    match readout.activation:
        case Activation.RELU:
            return max(number, 0.0)
        case Activation.JUMP_RELU:
            return number if number > readout.theta else 0.0
        case Activation.TANH:
            return math.tanh(number)
    return number
