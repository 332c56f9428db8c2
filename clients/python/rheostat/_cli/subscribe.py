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
    Subparsers,
    add_force,
    add_target,
    check_writable,
    connected,
    layers,
    points,
    writing,
)
from rheostat._cli._filters import add_filter, add_limit, add_where, selected, until_limit
from rheostat._fields import counted
from rheostat._positions import show_positions
from rheostat._responses.results import DroppedRows
from rheostat._subscriptions.events import CapturedRows, EndOfRequest, SubscriptionEvent

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
    add_filter(parser)
    parser.add_argument("--points", type=points, required=True, help="e.g. resid_post")
    parser.add_argument("--layers", type=layers, default="all", help="e.g. 3, 2-5 (default: all)")
    add_where(parser)
    parser.add_argument(
        "--overload",
        choices=get_args(Overload),
        help="what happens if rows arrive faster than they are printed (default: fail)",
    )
    add_limit(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.npz", help="also save the rows, as float32"
    )
    add_force(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line per event until the limit, or until interrupted."""
    if args.out is not None:
        check_writable(args.out, args.force, ".npz")
    columns: _Columns = {}
    with (
        connected(args) as engine,
        engine.subscribe(
            capture=Capture(args.points, args.layers, args.where),
            overload=args.overload,
            **selected(args),
        ) as subscription,
    ):
        for missed, reason in subscription.missed.items():
            print(
                f"{missed} began before the subscription and is not shown: {reason}",
                file=sys.stderr,
            )
        for sample in subscription.attached:
            at = sample.first_position
            first = "its next step" if at is None else f"position {at}"
            print(
                f"{sample.request_id} began before the subscription and is shown from {first} on",
                file=sys.stderr,
            )
        print(f"subscribed as {subscription.id}; waiting for requests", file=sys.stderr)
        try:
            for event in until_limit(subscription, EndOfRequest, args.limit):
                print(_line(event), flush=True)
                if args.out is not None and isinstance(event, CapturedRows):
                    _keep(event, columns)
        finally:
            if args.out is not None:
                tables: dict[str, Any] = {name: np.concatenate(c) for name, c in columns.items()}
                with writing(args.out) as temporary, temporary.open("wb") as file:
                    np.savez(file, **tables)
    return 0


def _line(event: SubscriptionEvent) -> str:
    match event:
        case CapturedRows():
            norm = float(np.linalg.norm(event.values, axis=-1).mean())
            sites = " ".join(map(str, event.sites))
            where = show_positions(event.positions)
            return f"{_whose(event)} {sites} at {where}: mean norm {norm:.4g}"
        case DroppedRows():
            rows = counted(event.row_count, "row")
            return f"{_whose(event)} lost {rows} at {show_positions(event.positions)}"
        case EndOfRequest():
            lost = f", {event.dropped_row_count} lost" if event.dropped_row_count else ""
            how = ", ".join(event.finish_reasons) or "still running"
            return f"{event.request_id} end: {counted(event.row_count, 'row')}{lost}; {how}"


def _whose(event: CapturedRows | DroppedRows) -> str:
    return f"{event.request_id} {'baseline' if event.baseline else 'sample'} {event.sample}"


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
