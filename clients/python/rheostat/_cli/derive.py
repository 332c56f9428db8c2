"""``rheostat vectors derive``: vectors that separate two files of prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from rheostat._cli._common import (
    CommandError,
    Subparsers,
    add_target,
    connected,
    layers,
    points,
    warn,
)
from rheostat._cli._progress import Phase
from rheostat._cli._stored import digests_by_name, warn_if_moved
from rheostat._positions import show_sites
from rheostat._steering.derivations import METHODS


def add(actions: Subparsers) -> None:
    """Register the action below ``rheostat vectors``."""
    derive = actions.add_parser(
        "derive",
        help="make vectors that separate two sets of prompts",
        description="Derive vectors from the last tokens of two sets of prompts, and show how well "
        "the row of each layer separates them.",
        example="""\
rheostat vectors derive --positive GLAD.txt --negative SAD.txt --points resid_post --layers all
rheostat vectors derive --positive GLAD.txt --negative SAD.txt --points resid_post --layers 3 \\
    --name joy""",
    )
    add_sets(derive)
    derive.add_argument(
        "--method",
        choices=METHODS,
        default="difference_of_means",
        help="method that derives the direction (default: %(default)s)",
    )
    derive.add_argument("--lora", metavar="NAME", help="a loaded adapter to run the prompts under")
    derive.add_argument(
        "--name", help="name to store the vector under (default: none; the server may evict it)"
    )
    derive.add_argument("--description", default="", help="text that is stored with the name")
    add_target(derive)
    derive.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the statistics of every row, then one line per vector."""
    positive, negative = read_prompts(args.positive), read_prompts(args.negative)
    with connected(args) as engine:
        before = digests_by_name(engine, args.name) if args.name else {}
        with Phase(f"running {len(positive)} + {len(negative)} prompts") as phase:
            derivation = engine.vectors.derive(
                positive,
                negative,
                points=args.points,
                layers=args.layers,
                method=args.method,
                name=args.name,
                description=args.description,
                lora=args.lora,
                progress=lambda done, total: phase.note(f"{done} of {total} done"),
            )
    print(derivation)
    if any(row.separation is None for row in derivation.rows):
        print("-: not defined; it needs two prompts or more in each set, and sets that differ")
    for vector in derivation.vectors:
        print(f"{vector.digest}  {vector.name or '-'}")
        warn_if_moved(before, vector)
    # The client itself warns if a whole vector is zero.
    differing = {row.site.point for row in derivation.rows if row.norm}
    rows = [row.site for row in derivation.rows if not row.norm and row.site.point in differing]
    if rows:
        warn(f"the two sets do not differ at {show_sites(rows)}: its rows are zero")
    return 0


def add_sets(parser: argparse.ArgumentParser) -> None:
    """Add the files of two sets of prompts, and the sites at which they are compared."""
    for which in ("positive", "negative"):
        parser.add_argument(
            f"--{which}", type=Path, metavar="FILE", required=True, help="one prompt per line"
        )
    parser.add_argument("--points", type=points, required=True, help="e.g. resid_post")
    parser.add_argument("--layers", type=layers, required=True, help='e.g. 3, 2-5, "all"')


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not blank. Raises CommandError if there are none."""
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot read {path}: {reason}", 2) from error
    if not prompts:
        raise CommandError(f"{path} holds no prompt", 2)
    return prompts
