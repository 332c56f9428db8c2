"""``rheostat watch``: what probes read of other clients' requests, live."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from typing import get_args

from rheostat._cli._common import Subparsers, add_target, connected, layers, points
from rheostat._cli._filters import add_filter, add_limit, add_where, selected, until_limit
from rheostat._cli._progress import Phase
from rheostat._cli._readings import Curves, documents, lines
from rheostat._cli._stops import Bounds, probe_name, read_bound
from rheostat._cli._stored import stored
from rheostat._client.engine import Engine
from rheostat._fields import counted
from rheostat._selectors import SelectorLike
from rheostat._steering.gates import Pool, Probe, ProbeRows, probe
from rheostat._steering.readouts import Normalise
from rheostat._steering.rules import Rule, Stop
from rheostat._watches.events import WatchedRequestEnded
from rheostat._watches.watch import Watch


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "watch",
        help="read other clients' requests with probes, live",
        description="Read other clients' requests with probes while they run: curves on a "
        "terminal, else one line per event. A probe reads x.v of each row x, along a stored vector "
        "v, or another number with --normalise.",
        example="""\
rheostat watch --every --probe joy --points resid_post --layers 3
rheostat watch --label team=red --probe gloom --stop-above gloom:2.5
rheostat watch --every --probe joy --limit 10 --json > readings.jsonl""",
    )
    add_filter(parser)
    parser.add_argument(
        "--probe",
        action="append",
        required=True,
        metavar="NAME",
        help="read along this stored vector; may be repeated",
    )
    parser.add_argument("--points", type=points, help="where it is read (default: the vector's)")
    parser.add_argument("--layers", type=layers, help='e.g. 3, 2-5, "all"')
    parser.add_argument(
        "--normalise",
        choices=get_args(Normalise),
        default="none",
        help="unit reads x.v / |v|, cosine x.v / (|x| |v|) (default: none, which is x.v)",
    )
    parser.add_argument(
        "--rows",
        choices=get_args(ProbeRows),
        default="each",
        help="read each row, or once the mean row of the prompt, at its last token (default: each)",
    )
    add_where(
        parser,
        None,
        "all; generated with --stop-above or --stop-below; prompt with --after-prompt or "
        "--rows prompt_mean",
    )
    for flag, side in (("--stop-above", "more"), ("--stop-below", "less")):
        parser.add_argument(
            flag,
            action="append",
            type=partial(read_bound, below=side == "less"),
            default=[],
            dest="bounds",
            metavar="NAME:NUMBER",
            help=f"end a request where this probe reads {side} than NUMBER, at the tokens of "
            "--where; may be repeated",
        )
    parser.add_argument(
        "--pool",
        choices=get_args(Pool),
        default="last",
        help="what --stop-above and --stop-below compare: the number of each token, or the mean or "
        "the largest number up to it (default: last)",
    )
    parser.add_argument(
        "--after-prompt",
        action="store_true",
        help="compare only once, at the end of the prompt, the readings of the prompt",
    )
    parser.add_argument(
        "--on-lost",
        choices=("continue", "hold", "stop"),
        help="what happens to the requests if this command is killed (default: continue)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each event")
    add_limit(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show events until the limit, or until interrupted."""
    bounds = _bounds(args)
    with connected(args) as engine:
        probes = [_probe(engine, name, args) for name in args.probe]
        named = dict(zip(args.probe, probes, strict=True))
        rules = [
            Rule(
                name,
                bound.condition(named[bound.probe], after_prompt=args.after_prompt),
                Stop(str(bound)),
            )
            for name, bound in bounds.items()
        ]
        with engine.watch(
            probes=probes, rules=rules, on_lost=args.on_lost, **selected(args)
        ) as watch:
            for missed, reason in watch.missed.items():
                print(f"{missed} is not read: {reason}", file=sys.stderr)
            if sys.stdout.isatty() and sys.stderr.isatty() and not args.json:
                _draw(watch, bounds, args.limit)
            else:
                print(f"watching as {watch.id}; waiting for requests", file=sys.stderr)
                _print(watch, bounds, args.limit, as_json=args.json)
    return 0


def _bounds(args: argparse.Namespace) -> Bounds:
    """The bounds of the flags. Exits if a flag names no --probe, or needs a bound and has none."""
    if not args.bounds and (args.after_prompt or args.pool != "last"):
        args.parser.error("--pool and --after-prompt need --stop-above or --stop-below")
    if args.after_prompt and args.where == "generated":
        args.parser.error("--after-prompt compares numbers of the prompt, not of --where generated")
    if args.rows == "prompt_mean" and args.where == "generated":
        args.parser.error("--rows prompt_mean reads rows of the prompt, not of --where generated")
    for bound in args.bounds:
        if bound.probe not in args.probe:
            args.parser.error(f"{bound.flag} {bound.probe}: there is no --probe {bound.probe}")
    return {
        f"stop-{number}": replace(bound, pool=args.pool) for number, bound in enumerate(args.bounds)
    }


def _where(args: argparse.Namespace) -> SelectorLike:
    """The tokens that are read.

    A prompt's first token often has the largest reading of all. So without ``--where``, bounds are
    compared with generated tokens alone.
    """
    where: SelectorLike = args.where
    if where is not None:
        return where
    if args.after_prompt or args.rows == "prompt_mean":
        return "prompt"
    return "generated" if args.bounds else "all"


def _probe(engine: Engine, name: str, args: argparse.Namespace) -> Probe:
    return probe(
        stored(engine, name),
        points=args.points,
        layers=args.layers,
        where=_where(args),
        normalise=args.normalise,
        rows=args.rows,
        name=probe_name(name),
    )


def _draw(watch: Watch, bounds: Bounds, limit: int | None) -> None:
    """Curves while requests run; the last of them stay on the screen."""
    curves = Curves(watch.columns, bounds)
    shown: list[str] = []
    ended = 0
    try:
        with Phase("watching") as phase:
            for event in until_limit(watch, WatchedRequestEnded, limit):
                curves.add(event)
                size = shutil.get_terminal_size()
                shown = curves.lines(size.columns, size.lines - 2)
                phase.show(shown)
                ended += isinstance(event, WatchedRequestEnded)
                phase.note(f"{counted(ended, 'request')} ended")
    finally:
        print(*shown, sep="\n")


def _print(watch: Watch, bounds: Bounds, limit: int | None, *, as_json: bool) -> None:
    for event in until_limit(watch, WatchedRequestEnded, limit):
        if as_json:
            for document in documents(event, bounds):
                print(json.dumps(document, ensure_ascii=False), flush=True)
        else:
            for line in lines(event, bounds):
                print(line, flush=True)
