"""``rheostat bench``: run a benchmark, if the package ``rheostat_bench`` is installed."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

from rheostat._cli._common import CommandError, Subparsers

_PACKAGE = "rheostat_bench"


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "bench",
        help="compare the server with stock vLLM",
        description="Run a benchmark; without a name, list them.",
        example="rheostat bench tpot --shape tiny --out results",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a benchmark")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="arguments of the benchmark; NAME --help shows them",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the benchmark."""
    if find_spec(_PACKAGE) is None:
        raise CommandError("the benchmarks are not installed: in a checkout, pip install ./bench")
    words = [] if args.name is None else [args.name, *args.arguments]
    os.execv(sys.executable, [sys.executable, "-m", _PACKAGE, *words])
