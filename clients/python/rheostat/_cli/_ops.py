"""Ops on the command line: one flag per op, in the order in which they act.

A flag takes names or digests of stored vectors. The ops act at --points and --layers, by default
those of the vectors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from rheostat._cli._common import CommandError, layers, points
from rheostat._cli._stored import stored
from rheostat._client.engine import Engine
from rheostat._points import show_layers
from rheostat._steering.interventions import Band, Clamp
from rheostat._steering.steering import ablate, norm_add, scale
from rheostat._steering.vectors import Add, Intervention, Vector

_HELP = {
    "--steer": ("NAME[:SCALE]", "add SCALE times a stored vector (default: 1)"),
    "--norm-add": (
        "NAME[:SCALE]",
        "add its direction, as long as SCALE norms of the residual stream (default: 1)",
    ),
    "--ablate": (
        "NAME[,NAME...][:STRENGTH]",
        "remove the part along directions; STRENGTH 0 to 1 (default: 1)",
    ),
    "--clamp": (
        "NAME:BOUNDS[:STRENGTH][,...]",
        "limit the coordinate along a direction to BOUNDS: MIN..MAX, MIN.., ..MAX, or one number",
    ),
    "--scale": ("NAME:FACTOR", "multiply the coordinate along a direction; -1 mirrors"),
}


class ParsedOp(NamedTuple):
    """A parsed op: the names of its vectors, and a function that makes the intervention."""

    names: tuple[str, ...]
    make: Callable[..., Intervention]
    """Takes the vectors in the order of the names."""


def add_ops(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all ops to a command."""
    group = parser.add_argument_group("steering", "Ops act in the order given.")
    for (flag, (metavar, text)), read in zip(_HELP.items(), _READERS, strict=True):
        group.add_argument(
            flag,
            type=read,
            action="append",
            default=[],
            dest="ops",
            metavar=metavar,
            help=text,
        )
    group.add_argument(
        "--points", type=points, help="where the ops act (default: the vector's points)"
    )
    group.add_argument("--layers", type=layers, help='e.g. 3, 2-5, "all"; with --points')


def steering(engine: Engine, args: argparse.Namespace) -> list[Intervention]:
    """The interventions of the flags of `add_ops`."""
    ops: list[ParsedOp] = args.ops
    if not ops and (args.points is not None or args.layers is not None):
        raise CommandError("--points and --layers are for ops, and no op is given", 2)
    interventions = [
        op.make(*(stored(engine, name) for name in op.names)).at(
            points=args.points, layers=args.layers
        )
        for op in ops
    ]
    for intervention in interventions:
        _check_layers(engine, intervention)
    return interventions


def _check_layers(engine: Engine, intervention: Intervention) -> None:
    """Raise CommandError if a vector of the op has no row for one of its layers."""
    if intervention.layers is None or intervention.layers == "all":
        return
    for vector in intervention.vectors:
        own = vector.layers_of_rows
        missing = [layer for layer in intervention.layers if own and layer not in own]
        if not missing:
            continue
        count = engine.model().layer_count
        if missing[-1] >= count:
            raise CommandError(
                f"layer {missing[-1]} is not one of the model's layers 0 to {count - 1}", 2
            )
        raise CommandError(
            f"{vector.label} has rows for layers {show_layers(own)}, not for layer {missing[0]}", 2
        )


def read_steer(text: str) -> ParsedOp:
    """NAME[:SCALE]."""
    name, *rest = _parts(text, 2)
    dose = _number(rest[0], text) if rest else 1.0
    return ParsedOp((name,), lambda vector: Add(vector, dose))


def read_norm_add(text: str) -> ParsedOp:
    """NAME[:SCALE]."""
    name, *rest = _parts(text, 2)
    dose = _number(rest[0], text) if rest else 1.0
    return ParsedOp((name,), lambda vector: norm_add(vector, dose))


def read_ablate(text: str) -> ParsedOp:
    """NAME[,NAME...][:STRENGTH]."""
    listed, *rest = _parts(text, 2)
    names = tuple(listed.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has a comma without a name beside it")
    strength = _number(rest[0], text) if rest else 1.0
    return ParsedOp(names, lambda *directions: ablate(*directions, strength=strength))


def read_clamp(text: str) -> ParsedOp:
    """NAME:BOUNDS[:STRENGTH][,...]."""
    bands = [_parts(band, 3) for band in text.split(",")]
    if any(len(parts) < 2 for parts in bands):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no bounds: MIN..MAX, MIN.., ..MAX or one number"
        )
    limits = [
        (*_bounds(parts[1], text), _number(parts[2], text) if len(parts) > 2 else 1.0)
        for parts in bands
    ]

    def make(*directions: Vector) -> Clamp:
        return Clamp(
            tuple(
                Band(direction, *limit) for direction, limit in zip(directions, limits, strict=True)
            )
        )

    return ParsedOp(tuple(parts[0] for parts in bands), make)


def read_scale(text: str) -> ParsedOp:
    """NAME:FACTOR."""
    name, *rest = _parts(text, 2)
    if not rest:
        raise argparse.ArgumentTypeError(f"{text!r} has no factor: NAME:FACTOR")
    factor = _number(rest[0], text)
    return ParsedOp((name,), lambda direction: scale(direction, factor))


_READERS = (read_steer, read_norm_add, read_ablate, read_clamp, read_scale)


def _parts(text: str, most: int) -> list[str]:
    """Splits at colons; the first part must not be empty."""
    parts = text.split(":")
    if "=" in parts[0]:  # no name has one
        raise argparse.ArgumentTypeError(
            f"{text!r} has = where a colon belongs: write {text.replace('=', ':', 1)}"
        )
    if not parts[0] or len(parts) > most:
        raise argparse.ArgumentTypeError(f"{text!r} begins with no name or has too many colons")
    return parts


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{whole!r} has no number in {text!r}") from None


def _bounds(text: str, whole: str) -> tuple[float | None, float | None]:
    """Parses MIN..MAX, either of which may be omitted, or one number for both."""
    low, dots, high = text.partition("..")
    if not dots:
        high = low
    return (
        _number(low, whole) if low or not dots else None,
        _number(high, whole) if high or not dots else None,
    )
