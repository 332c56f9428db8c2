"""``rheostat watch``: what probes read of other clients' requests, live."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

from rheostat._cli._common import Subparsers, add_target, connected, layers, points
from rheostat._cli._filters import add_filter, add_limit, add_where, selected
from rheostat._cli._progress import Phase
from rheostat._cli._readings import Curves, documents, lines
from rheostat._cli._stored import stored
from rheostat._client.engine import Engine
from rheostat._steering.gates import Probe, probe
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
        "v.",
        example="""\
rheostat watch --every --probe joy --points resid_post --layers 3
rheostat watch --label team=red --probe gloom --where generated --stop-above gloom:2.5
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
    add_where(parser)
    parser.add_argument(
        "--stop-above",
        action="append",
        type=_bound,
        default=[],
        metavar="NAME:NUMBER",
        help="end a request where this probe reads more, also in its prompt unless --where is "
        "generated; may be repeated",
    )
    parser.add_argument(
        "--on-lost",
        choices=("continue", "hold", "stop"),
        help="what becomes of the requests if this command is killed (default: continue)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each event")
    add_limit(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show events until the limit, or until interrupted."""
    with connected(args) as engine:
        probes = [_probe(engine, name, args) for name in args.probe]
        named = dict(zip(args.probe, probes, strict=True))
        for name, _ in args.stop_above:
            if name not in named:
                args.parser.error(f"--stop-above {name}: there is no --probe {name}")
        rules = [
            Rule(f"stop-{number}", named[name].above(bound), Stop(f"{name} above {bound:g}"))
            for number, (name, bound) in enumerate(args.stop_above)
        ]
        with engine.watch(
            probes=probes, rules=rules, on_lost=args.on_lost, **selected(args)
        ) as watch:
            for missed, reason in watch.missed.items():
                print(f"{missed} is not read: {reason}", file=sys.stderr)
            if sys.stdout.isatty() and sys.stderr.isatty() and not args.json:
                _draw(watch, args.limit)
            else:
                print(f"watching as {watch.id}; waiting for requests", file=sys.stderr)
                _print(watch, args.limit, as_json=args.json)
    return 0


def _probe(engine: Engine, name: str, args: argparse.Namespace) -> Probe:
    return probe(
        stored(engine, name),
        points=args.points,
        layers=args.layers,
        where=args.where,
        name=name.replace("/", "."),  # names of probes have no slash
    )


def _draw(watch: Watch, limit: int | None) -> None:
    """Curves while requests run; the last of them stay on the screen."""
    curves = Curves(watch.columns)
    shown: list[str] = []
    ended = 0
    try:
        with Phase("watching") as phase:
            for event in watch:
                curves.add(event)
                size = shutil.get_terminal_size()
                shown = curves.lines(size.columns, size.lines - 2)
                phase.show(shown)
                ended += isinstance(event, WatchedRequestEnded)
                phase.note(f"{ended} requests ended")
                if ended == limit:
                    break
    finally:
        print(*shown, sep="\n")


def _print(watch: Watch, limit: int | None, *, as_json: bool) -> None:
    ended = 0
    for event in watch:
        if as_json:
            for document in documents(event):
                print(json.dumps(document, ensure_ascii=False), flush=True)
        else:
            for line in lines(event):
                print(line, flush=True)
        ended += isinstance(event, WatchedRequestEnded)
        if ended == limit:
            return


def _bound(text: str) -> tuple[str, float]:
    """Parses NAME:NUMBER."""
    name, _, number = text.rpartition(":")
    try:
        if name:
            return name, float(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME:NUMBER")
