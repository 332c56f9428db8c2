"""``rheostat runs``: captured rows that the server stores in memory."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from rheostat._cli._common import (
    Subparsers,
    add_force,
    add_label,
    add_target,
    check_writable,
    connected,
    layers,
    points,
)
from rheostat._cli._listing import add_json, print_json, print_table
from rheostat._cli._progress import Phase
from rheostat._files import load_run, save_run
from rheostat._positions import show_ranges, show_sites
from rheostat._runs import RunInfo, valid_run_id


def add(commands: Subparsers) -> None:
    """Register the command and its own subcommands."""
    parser = commands.add_parser(
        "runs",
        help="list, get, put and delete stored runs",
        description="List, get, put and delete stored runs: captured rows that the server keeps "
        "in memory.",
        example="rheostat runs list\nrheostat runs get clean clean.safetensors",
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

    get = actions.add_parser(
        "get",
        help="save a run to a .safetensors file",
        description="Save a run to a .safetensors file, in its own dtype, with its positions and "
        "tokens: one tensor per site.",
        example="rheostat runs get clean clean.safetensors --points resid_post --layers 2-5",
    )
    get.add_argument("id", metavar="ID")
    get.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE.safetensors",
        help="default: ID.safetensors, here",
    )
    get.add_argument("--points", type=points, help="some of its points (default: all)")
    get.add_argument(
        "--layers", type=layers, default="all", help="some layers; with --points (default: all)"
    )
    add_force(get)
    get.set_defaults(run=run_get)

    put = actions.add_parser(
        "put",
        help="store a run that get has saved",
        description="Store a run that get has saved.",
        example="rheostat runs put clean.safetensors --id clean --lease 600",
    )
    put.add_argument("file", type=Path, metavar="FILE.safetensors")
    put.add_argument("--id", help="an id that no other run has (default: the server makes one)")
    put.add_argument(
        "--lease",
        type=float,
        metavar="SECONDS",
        help="how long it is not evicted (default: 3600)",
    )
    add_label(put, "may be repeated (default: the labels of the file)")
    put.set_defaults(run=run_put)

    delete = actions.add_parser(
        "delete",
        help="delete a run, leased or not",
        description="Delete a run, leased or not, unless it is in use.",
        example="rheostat runs delete clean",
    )
    delete.add_argument("id", metavar="ID")
    delete.set_defaults(run=run_delete)

    for action in (listing, get, put, delete):
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


def run_get(args: argparse.Namespace) -> int:
    """Save the rows of a run."""
    path = args.file or Path(f"{valid_run_id(args.id)}.safetensors")
    check_writable(path, args.force)
    with connected(args) as engine, Phase(f"fetching {args.id}"):
        run = engine.run(args.id)
        rows = engine.read_run(run, args.points, args.layers)
    save_run(path, run, rows)
    count, width = next(iter(rows.values())).shape
    print(f"{path}  {len(rows)} x {run.dtype or 'float32'} [{count}, {width}]")
    return 0


def run_put(args: argparse.Namespace) -> int:
    """Store the rows of a file."""
    stored = load_run(args.file)
    with connected(args) as engine, Phase(f"storing {args.file}"):
        run = engine.put_run(
            stored.rows,
            prompt_token_ids=stored.prompt_token_ids,
            positions=stored.positions,
            token_ids=stored.token_ids,
            run_id=args.id,
            lease=args.lease,
            labels=stored.labels if args.label is None else dict(args.label),
        )
    print(f"{run.id}  {show_sites(run.sites)}, positions {show_ranges(run.positions)}")
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
