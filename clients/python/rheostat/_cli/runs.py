"""``rheostat runs``: captured rows that the server stores in memory."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from rheostat._cli._common import Subparsers, add_target, connected
from rheostat._cli._listing import add_json, print_json, print_table
from rheostat._positions import show_ranges, show_sites
from rheostat._runs import RunInfo


def add(commands: Subparsers) -> None:
    """Register the command and its own subcommands."""
    parser = commands.add_parser(
        "runs",
        help="list and delete stored runs",
        description="List and delete stored runs: captured rows that the server keeps in memory.",
        example="rheostat runs list\nrheostat runs delete clean",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    listing = actions.add_parser(
        "list",
        help="show the stored runs, oldest first",
        description="Show the stored runs, oldest first.",
        example="rheostat runs list --json",
    )
    add_json(listing)
    listing.set_defaults(run=run_list)

    delete = actions.add_parser(
        "delete",
        help="delete a run, leased or not",
        description="Delete a run, leased or not, unless it is in use.",
        example="rheostat runs delete clean",
    )
    delete.add_argument("id", metavar="ID")
    delete.set_defaults(run=run_delete)

    for action in (listing, delete):
        add_target(action)


def run_list(args: argparse.Namespace) -> int:
    """Print one line per run."""
    with connected(args) as engine:
        runs = engine.runs()
    if args.json:
        print_json(runs)
    else:
        now = datetime.now(UTC)
        print_table(_HEAD, [_cells(run, now) for run in runs], "runs")
    return 0


def run_delete(args: argparse.Namespace) -> int:
    """Print the number of freed bytes."""
    with connected(args) as engine:
        print(f"deleted {args.id}; freed {engine.delete_run(args.id)} bytes")
    return 0


_HEAD = ("ID", "SITES", "POSITIONS", "BYTES", "LEASE", "LABELS")


def _cells(run: RunInfo, now: datetime) -> tuple[str, ...]:
    left = (run.lease_expire_time - now).total_seconds()
    return (
        run.id,
        show_sites(run.sites),
        show_ranges(run.positions),
        str(run.size_bytes),
        f"{left:.0f} s" if left > 0 else "-",
        " ".join(f"{key}={value}" for key, value in sorted(run.labels.items())),
    )
