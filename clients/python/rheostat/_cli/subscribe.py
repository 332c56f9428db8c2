"""``rheostat subscribe``: captured rows of other clients' requests, one line per event."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from rheostat._capture.captures import Capture, Overload
from rheostat._cli._common import (
    CommandError,
    Subparsers,
    add_force,
    add_target,
    connected,
    label,
    layers,
    may_write,
    points,
)
from rheostat._responses.results import DroppedRows
from rheostat._selectors import PhaseName, Selector, positions
from rheostat._subscriptions.events import CapturedRows, EndOfRequest, SubscriptionEvent
from rheostat._subscriptions.subscription import Subscription

_Columns = dict[str, list[npt.NDArray[np.generic]]]


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "subscribe",
        help="print captured rows of other clients' requests, live",
        description="Print captured rows of other clients' requests while they run: one line per "
        "event, with the mean norm of the rows.",
        example="""\
rheostat subscribe --every --points resid_post --layers 3 --limit 10 --out rows.npz
rheostat subscribe --label team=red --points resid_post --where -1""",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--request", action="append", metavar="ID", help="watch this request; may be repeated"
    )
    which.add_argument(
        "--label",
        action="append",
        type=label,
        metavar="KEY=VALUE",
        help="watch requests with this label; if repeated, requests with all of them",
    )
    which.add_argument("--every", action="store_true", help="watch every request")
    parser.add_argument("--points", type=points, required=True, help="e.g. resid_post")
    parser.add_argument("--layers", type=layers, default="all", help="e.g. 3, 2-5 (default: all)")
    parser.add_argument(
        "--where",
        type=_where,
        default="all",
        help="prompt, generated, all, or positions: -1 is the last prompt token; write several "
        "as --where=0,-1 (default: all)",
    )
    parser.add_argument(
        "--overload",
        choices=get_args(Overload),
        help="what happens if rows arrive faster than they are printed (default: fail)",
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="end after N requests (default: never)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.npz", help="also save the rows, as float32"
    )
    add_force(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line per event until the limit, or until interrupted."""
    if args.out is not None:
        if args.out.suffix != ".npz":
            raise CommandError(f"{args.out} does not end in .npz", 2)
        may_write(args.out, args.force)
    columns: _Columns = {}
    with (
        connected(args) as engine,
        engine.subscribe(
            capture=Capture(args.points, args.layers, args.where),
            requests=args.request,
            labels=None if args.label is None else dict(args.label),
            every=args.every,
            overload=args.overload,
        ) as subscription,
    ):
        for missed, reason in subscription.missed.items():
            print(
                f"{missed} began before the subscription and is not shown: {reason}",
                file=sys.stderr,
            )
        for sample in subscription.attached:
            first = (
                "its next step"
                if sample.first_position is None
                else f"position {sample.first_position}"
            )
            print(
                f"{sample.request_id} began before the subscription and is shown from {first} on",
                file=sys.stderr,
            )
        print(f"subscribed as {subscription.id}; waiting for requests", file=sys.stderr)
        try:
            _show(subscription, args.limit, columns if args.out else None)
        finally:
            if args.out is not None:
                tables: dict[str, Any] = {name: np.concatenate(c) for name, c in columns.items()}
                np.savez(args.out, **tables)
    return 0


def _show(subscription: Subscription, limit: int | None, columns: _Columns | None) -> None:
    ended = 0
    for event in subscription:
        print(_line(event), flush=True)
        if columns is not None and isinstance(event, CapturedRows):
            _keep(event, columns)
        ended += isinstance(event, EndOfRequest)
        if ended == limit:
            return


def _line(event: SubscriptionEvent) -> str:
    match event:
        case CapturedRows():
            norm = float(np.linalg.norm(event.values, axis=-1).mean())
            sites = " ".join(map(str, event.sites))
            return f"{_whose(event)} {sites} at {_shown(event.positions)}: mean norm {norm:.4g}"
        case DroppedRows():
            return f"{_whose(event)} lost {event.row_count} rows at {_shown(event.positions)}"
        case EndOfRequest():
            lost = f", {event.dropped_row_count} lost" if event.dropped_row_count else ""
            how = ", ".join(event.finish_reasons) or "still running"
            return f"{event.request_id} end: {event.row_count} rows{lost}; {how}"


def _whose(event: CapturedRows | DroppedRows) -> str:
    return f"{event.request_id} {'baseline' if event.baseline else 'sample'} {event.sample}"


def _shown(positions: npt.NDArray[np.int64]) -> str:
    """As "0-4, 7"."""
    ends = np.flatnonzero(np.diff(positions) > 1) + 1
    runs = [(int(run[0]), int(run[-1])) for run in np.split(positions, ends) if len(run)]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _keep(event: CapturedRows, columns: _Columns) -> None:
    """Append rows to table REQUEST/POINT.LAYER, which has the columns of a sink's tables."""
    count = len(event.positions)
    for rows in event.rows:
        table = f"{event.request_id}/{rows.point}.{rows.layer}"
        for name, column in (
            ("rows", rows.values),
            ("positions", rows.positions.astype(np.int32)),
            ("token_ids", rows.token_ids.astype(np.int32)),
            ("samples", np.full(count, rows.sample, np.int32)),
            ("baseline", np.full(count, rows.baseline, np.uint8)),
        ):
            columns.setdefault(f"{table}.{name}", []).append(column)


def _where(text: str) -> Selector | str:
    if text in get_args(PhaseName):
        return text
    try:
        return positions(*(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither prompt, generated, all nor positions such as -1 or 0,5"
        ) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests")
    return int(text)
