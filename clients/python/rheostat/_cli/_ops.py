"""Ops on the command line: one flag per op, in the order in which they act.

A flag takes names or digests of stored vectors. The ops act at --points and --layers, by default
those of the vectors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from rheostat._cli._common import CommandError, layers, points
from rheostat._cli._stored import stored
from rheostat._client.engine import Engine
from rheostat._fields import is_finite
from rheostat._points import show_layers
from rheostat._steering.interventions import Band, Clamp
from rheostat._steering.steering import ablate, norm_add, scale
from rheostat._steering.vectors import Add, Intervention, Vector

_HELP = {
    "--steer": ("NAME[:SCALE]", "add SCALE times a stored vector (default: 1)"),
    "--norm-add": (
        "NAME[:SCALE]",
        "add the vector's direction with SCALE times the norm of the residual stream (default: 1)",
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


_WRONG_SEPARATOR = re.compile(r".*?( *[=*@] *| +).*")
"""Matches a text with =, *, @ or spaces where a colon belongs. Names contain none of these."""


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
    name, dose = _name_and_dose(text)
    return ParsedOp((name,), lambda vector: Add(vector, dose))


def read_norm_add(text: str) -> ParsedOp:
    """NAME[:SCALE]."""
    name, dose = _name_and_dose(text)
    return ParsedOp((name,), lambda vector: norm_add(vector, dose))


def read_ablate(text: str) -> ParsedOp:
    """NAME[,NAME...][:STRENGTH]."""
    typed = _TypedOp(text, "NAME[,NAME...][:STRENGTH], such as joy or joy,fear:0.5")
    listed, *rest = typed.parts(text, 2)
    names = tuple(typed.name(name) for name in listed.split(","))
    strength = typed.number(rest[0]) if rest else 1.0
    return ParsedOp(names, lambda *directions: ablate(*directions, strength=strength))


def read_clamp(text: str) -> ParsedOp:
    """NAME:BOUNDS[:STRENGTH][,...]."""
    typed = _TypedOp(text, "NAME:BOUNDS[:STRENGTH][,...], such as joy:-1..2, joy:..2 or joy:0")
    bands = [typed.parts(band, 3) for band in text.split(",")]
    names = tuple(typed.name(parts[0]) for parts in bands)
    if any(len(parts) < 2 for parts in bands):
        typed.refuse("has no bounds")
    limits = [
        (*_bounds(typed, parts[1]), typed.number(parts[2]) if len(parts) > 2 else 1.0)
        for parts in bands
    ]

    def make(*directions: Vector) -> Clamp:
        return Clamp(
            tuple(
                Band(direction, *limit) for direction, limit in zip(directions, limits, strict=True)
            )
        )

    return ParsedOp(names, make)


def read_scale(text: str) -> ParsedOp:
    """NAME:FACTOR."""
    typed = _TypedOp(text, "NAME:FACTOR, such as joy:-1")
    name, *rest = typed.parts(text, 2)
    name = typed.name(name)
    if not rest:
        typed.refuse("has no factor")
    factor = typed.number(rest[0])
    return ParsedOp((name,), lambda direction: scale(direction, factor))


_READERS = (read_steer, read_norm_add, read_ablate, read_clamp, read_scale)


class _TypedOp(NamedTuple):
    """The text of an op. Each error for it ends with the syntax of the op."""

    text: str
    syntax: str
    """The syntax of the op, with an example."""

    def parts(self, text: str, most: int) -> list[str]:
        """Splits a part of the text at colons; at most `most` parts are allowed."""
        parts = text.split(":")
        if len(parts) > most:
            self.refuse("has too many colons")
        return parts

    def name(self, text: str) -> str:
        """Checks the name or digest of a vector."""
        if text != text.strip():
            self.refuse("has a space before or after a name")
        if match := _WRONG_SEPARATOR.fullmatch(text):
            self.refuse(f"has {match[1].strip() or 'a space'} where a colon belongs")
        if not text:
            self.refuse("has no name" if "," not in self.text else "has a comma without a name")
        return text

    def number(self, text: str) -> float:
        """Parses a finite number."""
        try:
            number = float(text)
        except ValueError:
            self.refuse(f"has no number {f'in {text!r}' if text else 'after a colon'}")
        if not is_finite(number):
            self.refuse(f"has {text}, which is not a finite number in float32")
        return number

    def refuse(self, cause: str) -> NoReturn:
        """Raises an error with a cause and the syntax."""
        raise argparse.ArgumentTypeError(f"{self.text!r} {cause}: write {self.syntax}")


def _name_and_dose(text: str) -> tuple[str, float]:
    typed = _TypedOp(text, "NAME[:SCALE], such as joy:0.5")
    name, *rest = typed.parts(text, 2)
    return typed.name(name), typed.number(rest[0]) if rest else 1.0


def _bounds(typed: _TypedOp, text: str) -> tuple[float | None, float | None]:
    """Parses MIN..MAX, either of which may be omitted, or one number for both."""
    low, dots, high = text.partition("..")
    if not dots:
        high = low
    return (
        typed.number(low) if low or not dots else None,
        typed.number(high) if high or not dots else None,
    )
