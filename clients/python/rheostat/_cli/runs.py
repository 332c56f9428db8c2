"""``rheostat runs``: captures that the server has stored, for patches to draw from."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from rheostat._cli._common import Subparsers, add_target, connected
from rheostat._receipts import show_runs
from rheostat._runs import RunInfo


def add(commands: Subparsers) -> None:
    """Register the command and its own subcommands."""
    parser = commands.add_parser("runs", help="list and delete stored runs")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="show what is stored, oldest first")
    listing.set_defaults(run=run_list)

    delete = actions.add_parser("delete", help="delete a run, leased or not")
    delete.add_argument("id", metavar="ID")
    delete.set_defaults(run=run_delete)

    for action in (listing, delete):
        add_target(action)


def run_list(args: argparse.Namespace) -> int:
    """Print one line per run."""
    with connected(args) as engine:
        for run in engine.runs():
            print(_line(run, datetime.now(UTC)))
    return 0


def run_delete(args: argparse.Namespace) -> int:
    """Print how many bytes became free."""
    with connected(args) as engine:
        print(f"{engine.delete_run(args.id)} bytes  {args.id}")
    return 0


def _line(run: RunInfo, now: datetime) -> str:
    left = (run.lease_expire_time - now).total_seconds()
    parts = [
        run.id,
        f"{len(run.sites)} {'site' if len(run.sites) == 1 else 'sites'}",
        f"positions {show_runs(run.positions)}",
        f"{run.size_bytes} bytes",
        f"leased for {left:.0f} s" if left > 0 else "not leased",
        *(f"{key}={value}" for key, value in sorted(run.labels.items())),
    ]
    return "  ".join(parts)
