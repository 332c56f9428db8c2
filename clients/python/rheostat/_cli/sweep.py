"""``rheostat sweep``: activation patching over a grid of layers and positions."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import warnings
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import get_args

from rheostat._cli import _grid
from rheostat._cli._common import (
    CommandError,
    Subparsers,
    add_force,
    add_target,
    check_writable,
    connected,
    layers,
    need_matplotlib,
    points,
    ranges,
    warn,
    writing,
)
from rheostat._cli._listing import json_text
from rheostat._cli._progress import Phase
from rheostat._selectors import Selector, span, window
from rheostat._steering.replacements import Noise, Zeros, from_run, run_mean
from rheostat._sweeps.grades import Metric
from rheostat._sweeps.pairs import Corruption, NoisyPrompt, Pair
from rheostat._sweeps.requests import SweepOptions, Zoom
from rheostat._sweeps.result import SweepResult

_POSITIONS = re.compile(r"(-?\d+)(?:-(-?\d+))?")
_EMBEDDING_STD = 3.0
"""Noise of a causal trace (Meng et al., 2022), in standard deviations of the token embedding."""
_SPARE_LINES = 3
"""Lines of a terminal that the grid leaves: the progress, and the command that was typed."""


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "sweep",
        help="find the layers and positions that decide an answer",
        description="Put rows of one prompt into another, at each layer and position, and show "
        "what this does to the answer. Shows the grid while it is run, then prints it.",
        example="""\
rheostat sweep "The Eiffel Tower is in the city of" --answer " Paris" --foil " Istanbul" \\
    --corrupt "The Galata Tower is in the city of" --png sweep.png
rheostat sweep "The Eiffel Tower is in the city of" --answer " Paris" --noise-on "Eiffel Tower" \\
    --points mlp_out --window 3

docs/causal-tracing.md says how to read the grid.""",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the clean prompt")
    _add_corruptions(parser)
    _add_answers(parser)
    _add_grid(parser)
    _add_cells(parser)
    _add_files(parser)
    add_target(parser)
    parser.set_defaults(run=run)


def _add_corruptions(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--corrupt", metavar="PROMPT", help="the corrupt prompt")
    which.add_argument(
        "--noise-on", metavar="TEXT", help="put noise on the embeddings of this text of the prompt"
    )
    which.add_argument("--zeros", action="store_true", help="replace rows by zeros")
    which.add_argument(
        "--run-mean", metavar="ID", help="replace rows by the mean row of a stored run"
    )
    which.add_argument("--from-run", metavar="ID", help="a stored run of the corrupt prompt")
    noise = parser.add_argument_group("noise", "With --noise-on.")
    noise.add_argument(
        "--embedding-std",
        type=float,
        metavar="FACTOR",
        help="standard deviation of the noise, as a multiple of that of the model's token "
        f"embedding (default: {_EMBEDDING_STD:g})",
    )
    noise.add_argument("--std", type=float, help="standard deviation of the noise, as a number")
    noise.add_argument(
        "--noise-count", type=int, metavar="N", help="noise samples to average over (default: 10)"
    )
    noise.add_argument(
        "--noise-seed", type=int, metavar="SEED", help="seed of the first sample (default: 0)"
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--answer",
        action="append",
        metavar="TEXT",
        help='the right answer; a leading space counts: " Paris"; may be repeated; only '
        "--grade kl needs none",
    )
    parser.add_argument(
        "--foil", action="append", metavar="TEXT", help="the wrong answer; may be repeated"
    )
    parser.add_argument(
        "--grade",
        action="append",
        metavar="GRADE",
        help=f'{", ".join(get_args(Metric))}, or "recovered logprob" and so on; may be repeated '
        "(default: recovered logit_difference with a foil, else recovered logprob; with --zeros "
        "and --run-mean, the same without recovered)",
    )


def _add_grid(parser: argparse.ArgumentParser) -> None:
    grid = parser.add_argument_group("grid")
    grid.add_argument("--points", type=points, default=["resid_post"], help="default: resid_post")
    grid.add_argument("--layers", type=layers, default="all", help="e.g. 3, 2-5 (default: all)")
    grid.add_argument(
        "--positions",
        type=_positions,
        help="e.g. 0,3-5,-1; -1 is the last token; write --positions=-3--1 (default: all)",
    )
    grid.add_argument(
        "--zoom",
        type=_zoom,
        metavar="LAYERS[,POSITIONS]",
        help="first run every N-th layer and position, then all cells around the largest effect",
    )


def _add_cells(parser: argparse.ArgumentParser) -> None:
    cells = parser.add_argument_group("cells")
    cells.add_argument(
        "--window", type=int, metavar="LAYERS", help="layers that a cell replaces (default: 1)"
    )
    cells.add_argument(
        "--direction",
        choices=("denoise", "noise"),
        help="denoise puts clean rows into the corrupt prompt, noise corrupt ones into the clean "
        "(default: denoise; with --zeros and --run-mean, noise)",
    )
    cells.add_argument("--lora", metavar="NAME", help="a loaded adapter to run under")
    cells.add_argument(
        "--keep-runs",
        type=float,
        metavar="SECONDS",
        help="keep the captured runs for this time, and print their ids",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("--png", type=Path, metavar="FILE.png", help="draw the grid")
    files.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    files.add_argument(
        "--save", type=Path, metavar="FILE.npz", help="save it for rheostat.SweepResult.load"
    )
    files.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="save each cell once it is run; if the file exists, run only the cells that it lacks",
    )
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    """Show the grid while it is run, then print it and write the files."""
    _check(args)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        pair = Pair(args.prompt, _corruption(args), args.answer, args.foil)
    for one in noted:
        warn(f"warning: {one.message}")
    with connected(args) as engine, Phase("sweeping") as phase:

        def watch(result: SweepResult) -> None:
            size = shutil.get_terminal_size()
            phase.show(_grid.shaded(result, size.columns, size.lines - _SPARE_LINES))

        try:
            result = engine.sweep(
                pair,
                points=args.points,
                layers=args.layers,
                grades=args.grade or _grade(args),
                progress=lambda done, total: phase.note(f"{done} of {total} cells"),
                watch=watch if phase.terminal else False,
                checkpoint=args.checkpoint,
                **_options(args),
            )
        except OSError as error:
            reason = error.strerror or error
            raise CommandError(f"cannot use {error.filename}: {reason}") from error
    try:
        _write(args, result)
    finally:  # a full disk must not lose a result that took an hour
        _print(result)
    for path in filter(None, (args.png, args.json, args.save)):
        print(f"wrote {path}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise CommandError for flags that do not go together, and for files with a wrong suffix."""
    for flag in ("std", "embedding_std", "noise_count", "noise_seed"):
        if getattr(args, flag) is not None and args.noise_on is None:
            raise CommandError(f"{_typed(flag)} is for --noise-on", 2)
    if args.std is not None and args.embedding_std is not None:
        raise CommandError("give --std or --embedding-std, not both", 2)
    if args.answer is None and set(args.grade or [""]) - {"kl", "recovered kl"}:
        raise CommandError("--answer is required, except with --grade kl", 2)
    if args.foil is None and any("logit_difference" in grade for grade in args.grade or ()):
        raise CommandError("--grade logit_difference needs --foil", 2)
    for flag, suffix in (("png", ".png"), ("save", ".npz"), ("json", None)):
        if (path := getattr(args, flag)) is not None:
            check_writable(path, args.force, suffix)
    if args.png is not None:
        need_matplotlib()


def _typed(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _corruption(args: argparse.Namespace) -> Corruption:
    if args.noise_on is not None:
        scale = _EMBEDDING_STD if args.embedding_std is None else args.embedding_std
        noise = Noise(
            std=args.std,
            embedding_std=scale if args.std is None else None,
            seed=args.noise_seed or 0,
        )
        noisy = NoisyPrompt(noise, where=span(args.noise_on))
        return noisy if args.noise_count is None else replace(noisy, count=args.noise_count)
    if args.zeros:
        return Zeros()
    if args.run_mean is not None:
        return run_mean(args.run_mean)
    if args.from_run is not None:
        return from_run(args.from_run)
    corrupt: str = args.corrupt
    return corrupt


def _grade(args: argparse.Namespace) -> str:
    """The default grade."""
    metric = "logprob" if args.foil is None else "logit_difference"
    ablates = args.zeros or args.run_mean is not None
    return metric if ablates else f"recovered {metric}"


def _options(args: argparse.Namespace) -> SweepOptions:
    """The options that are given."""
    options = SweepOptions()
    if args.positions is not None:
        options["where"] = args.positions
    if args.zoom is not None:
        options["zoom"] = args.zoom
    if args.window is not None:
        options["window"] = args.window
    if args.direction is not None:
        options["direction"] = args.direction
    if args.lora is not None:
        options["lora"] = args.lora
    if args.keep_runs is not None:
        options["keep_runs"] = args.keep_runs
    return options


def _write(args: argparse.Namespace, result: SweepResult) -> None:
    """Write the files."""
    if args.save is not None:
        with writing(args.save) as temporary:
            result.save(temporary)
    if args.json is not None:
        with writing(args.json) as temporary:
            temporary.write_text(f"{json_text(_document(result))}\n", encoding="utf-8")
    if args.png is not None:
        with writing(args.png) as temporary:
            result.heatmap(temporary)


def _document(result: SweepResult) -> dict[str, object]:
    """The result for JSON."""
    grades = [
        {
            "grade": grade,
            "values": result.values[number],
            "standard_errors": result.standard_errors[number],
            "clean": result.clean[number],
            "corrupt": result.corrupt[number],
            "noise": result.noise[number],
        }
        for number, grade in enumerate(result.grades)
    ]
    return {
        "grades": grades,
        "sites": result.sites,
        "columns": result.columns,
        "tokens": result.tokens,
        "top_token_ids": result.top_token_ids,
        "below_noise": result.below_noise,
        "skipped": result.skipped,
        "pairs": result.pairs,
        "run_ids": result.run_ids,
        "computed_token_count": result.computed_token_count,
        "seconds": result.seconds,
    }


def _print(result: SweepResult) -> None:
    """Print a table for each grade, or its shades if a terminal is too narrow for numbers."""
    size = shutil.get_terminal_size()
    for grade in result.grades:
        lines = _grid.table(result, grade)
        if sys.stdout.isatty() and max(map(len, lines)) > size.columns:
            lines = _grid.shaded(result, size.columns, size.lines, grade)
        print(grade, *lines, sep="\n")
    if result.below_noise.any():
        print("~: within the noise of repeated runs")
    if result.skipped:
        print("-: skipped; the reasons follow")
    print(result)
    if result.run_ids:
        print(f"kept runs: {' '.join(result.run_ids)}")


def _positions(text: str) -> Selector:
    """Parses positions: "3", "-1", "0,3-5" or "-3--1"; both ends are included."""
    spans = ranges(text, _POSITIONS, "positions are 3, -1, 2-5 or 0,3-5,-1")
    windows = (window(first, None if last == -1 else last + 1) for first, last in spans)
    return reduce(or_, windows)


def _zoom(text: str) -> Zoom:
    """Parses "4" or "4,2"."""
    first, comma, second = text.partition(",")
    numbers = (first, second if comma else first)
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not N or N,M, each at least 1")
    return Zoom(layer_stride=int(numbers[0]), column_stride=int(numbers[1]))
