"""``rheostat conditions fit``: a condition that tells two files of prompts apart."""

from __future__ import annotations

import argparse
import shlex
from typing import get_args

import numpy as np

from rheostat._cli._common import Subparsers, add_target, connected
from rheostat._cli._progress import Phase
from rheostat._cli._stored import digests_by_name, short_digest, stored, warn_if_moved
from rheostat._cli.derive import add_sets, read_prompts
from rheostat._connection.channel import default_target
from rheostat._steering.condition_fits import ConditionFits
from rheostat._steering.gates import Pool, ProbeRows
from rheostat._steering.readouts import Normalise

_POOLS: tuple[Pool, ...] = ("last", "mean")
_NORMALISES: tuple[Normalise, ...] = ("unit", "cosine")
"""Those that are tried by default."""


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "conditions",
        help="find conditions that tell prompts apart",
        description="Find conditions that tell two sets of prompts apart, for gates.",
        example="""\
rheostat conditions fit --positive SAD.txt --negative GLAD.txt --points resid_post --layers all""",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    fit = actions.add_parser(
        "fit",
        help="find a condition that holds of one set of prompts and not of another",
        description="Try every site, pooling, direction and readout on two sets of prompts, and "
        "show the conditions that tell held-out prompts apart best. Also print a rheostat watch "
        "command that ends every request for which the best condition holds, if it tells the sets "
        "apart.",
        example="""\
rheostat conditions fit --positive SAD.txt --negative GLAD.txt --points resid_post --layers all
rheostat conditions fit --positive SAD.txt --negative GLAD.txt --points resid_post --layers 2-4 \\
    --vector joy --name gloom
rheostat conditions fit --positive SAD.txt --negative GLAD.txt --points resid_post --layers all \\
    --rows prompt_mean --normalise projected_cosine  # as in conditional activation steering""",
    )
    add_sets(fit)
    fit.add_argument(
        "--vector",
        action="append",
        default=[],
        metavar="NAME",
        help="try a stored vector instead of directions derived from the prompts; may be repeated",
    )
    fit.add_argument(
        "--normalise",
        choices=(*_NORMALISES, "projected_cosine"),
        help="read only x.v / |v| (unit), only x.v / (|x| |v|) (cosine), or only the cosine of x "
        "and its projection on v (projected_cosine) (default: try unit and cosine)",
    )
    fit.add_argument(
        "--rows",
        choices=get_args(ProbeRows),
        default="each",
        help="judge a prompt by a reading of each token (each), or by one reading of its mean row "
        "(prompt_mean) (default: each)",
    )
    fit.add_argument(
        "--pool",
        choices=_POOLS,
        help="judge a prompt by its last reading, or by the mean of all (default: try both)",
    )
    fit.add_argument("--lora", metavar="NAME", help="a loaded adapter to run the prompts under")
    fit.add_argument("--name", help="name to store the best direction under (default: none)")
    fit.add_argument("--description", default="", help="text that is stored with the name")
    add_target(fit)
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the best conditions, the best one's vector, and a command that watches with it."""
    if args.pool and args.rows == "prompt_mean":
        args.parser.error(
            "--pool needs a reading of each token, but --rows prompt_mean has only one"
        )
    positive, negative = read_prompts(args.positive), read_prompts(args.negative)
    with connected(args) as engine:
        before = digests_by_name(engine, args.name) if args.name else {}
        vectors = [stored(engine, name) for name in args.vector]
        with Phase(f"running {len(positive)} + {len(negative)} prompts") as phase:
            found = engine.conditions.fit(
                positive,
                negative,
                points=args.points,
                layers=args.layers,
                vectors=vectors,
                rows=args.rows,
                pools=[args.pool] if args.pool else None,
                normalises=[args.normalise] if args.normalise else _NORMALISES,
                name=args.name,
                description=args.description,
                lora=args.lora,
                progress=lambda done, total: phase.note(f"{done} of {total} done"),
            )
    print(found)
    if found.tells_apart is None:
        print("-: unknown, because a set has one prompt, or all other prompts read alike")
    print(f"{found.vector.digest}  {found.vector.name or '-'}")
    if found.tells_apart is not False:  # else the client has logged a warning
        command = _watch(found, args.target)
        print(f"to end requests for which the best condition holds:\n  {command}")
    warn_if_moved(before, found.vector)
    return 0


def _watch(found: ConditionFits, target: str) -> str:
    """The `rheostat watch` that ends requests for which the best condition holds.

    If only the last prompt token counts, no other token is read, so that the rest of the prompt may
    come from the prefix cache.
    """
    best = found.best
    vector = found.vector.name or short_digest(found.vector)
    line = ["rheostat", "watch", "--every"]
    line += ["--target", target] if target != default_target() else []
    line += ["--probe", vector, "--points", best.site.point, "--layers", str(best.site.layer)]
    line += ["--normalise", best.normalise]
    if best.rows == "prompt_mean":
        line += ["--rows", best.rows, "--after-prompt"]
    elif best.pool == "last":
        line += ["--where", "-1"]
    else:
        line += ["--pool", best.pool, "--after-prompt"]
    bound = str(np.float32(best.threshold))  # the shortest text that is exact
    line += ["--stop-below" if best.below else "--stop-above", f"{vector}:{bound}"]
    return shlex.join(line)
