"""``rheostat info``: the model and the counters of a server."""

from __future__ import annotations

import argparse

from rheostat._cli._common import Subparsers, add_target, connected
from rheostat._cli._listing import add_json, print_json
from rheostat._fields import counted
from rheostat._responses.model import Stats


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "info",
        help="show a server's model, sites and counters",
        description="Show the model that a server runs, where it can be steered and captured, "
        "its limits, and how many requests run.",
        example="rheostat info --target localhost:50051",
    )
    add_json(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the model and the counters."""
    with connected(args) as engine:
        model, stats = engine.model(), engine.stats()
    if args.json:
        print_json({"model": model, "stats": stats})
    else:
        print(model)
        print(f"  now: {_text(stats)}")
    return 0


def _text(stats: Stats) -> str:
    text = (
        f"{stats.running_request_count} running, {stats.waiting_request_count} waiting, "
        f"{stats.completed_count} completed, {stats.failed_count} failed, "
        f"{stats.used_bank_row_count} of {stats.bank_row_count} bank rows, "
        f"{counted(stats.vector_count, 'vector')}, up {stats.uptime:.0f} s"
    )
    return f"{text}, {stats.leaked_count} LEAKED" if stats.leaked_count else text
