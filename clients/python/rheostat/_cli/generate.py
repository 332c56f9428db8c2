"""``rheostat generate``: continue a prompt, steered or not; text on stdout, the rest on stderr."""

from __future__ import annotations

import argparse
import sys

from rheostat._cli._common import Subparsers, add_target, layers, points
from rheostat._engine import Engine, connect
from rheostat._errors import NotFound
from rheostat._results import Tokens
from rheostat._vectors import Steer, named

_MAX_TOKENS = 128


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser("generate", help="continue a prompt, steered or not")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    add_target(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=_MAX_TOKENS, help=f"default: {_MAX_TOKENS}"
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's, 1)")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument(
        "--steer",
        type=dose,
        action="append",
        default=[],
        metavar="NAME[:SCALE]",
        help="add a stored vector, this many times (default scale: 1); may be repeated",
    )
    parser.add_argument("--points", type=points, help="where to steer (default: the vector's own)")
    parser.add_argument("--layers", type=layers, help='e.g. 3, 2-5, "all"; with --points')
    parser.set_defaults(run=run)


def dose(text: str) -> tuple[str, float]:
    """A vector's name and its scale, as typed."""
    name, colon, scale = text.rpartition(":")
    if not colon:
        return text, 1.0
    try:
        return name, float(scale)
    except ValueError:
        raise argparse.ArgumentTypeError(f"NAME[:SCALE] has no number in {scale!r}") from None


def run(args: argparse.Namespace) -> int:
    """Print the continuation as it comes, then the receipt where something was steered."""
    with connect(args.target) as engine:
        steering = [_steer(engine, name, args) * scale for name, scale in args.steer]
        with engine.stream(
            args.prompt,
            steering=steering,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
        ) as stream:
            for event in stream:
                if isinstance(event, Tokens):
                    print(event.text, end="", flush=True)
            print(flush=True)
            if steering:
                print(stream.result().receipt, file=sys.stderr)
    return 0


def _steer(engine: Engine, name: str, args: argparse.Namespace) -> Steer:
    """The named vector, at the sites of the command line or else at those kept with its name."""
    if args.points is not None and args.layers is not None:
        return named(name).at(points=args.points, layers=args.layers)
    for stored in engine.vectors.list(name):
        if stored.vector.name == name:
            return stored.vector.at(points=args.points, layers=args.layers)
    raise NotFound(f"no vector is named {name!r}", reason="REASON_NAME_NOT_FOUND")
