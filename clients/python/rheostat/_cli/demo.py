"""``rheostat demo``: steering, capture and a causal trace, shown on a real server."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import textwrap
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path

from rheostat import aio
from rheostat._cli import _tone, _trace
from rheostat._cli._child import demo_server
from rheostat._cli._common import (
    CommandError,
    Subparsers,
    check_writable,
    need_matplotlib,
    need_server,
)
from rheostat._cli._progress import Phase
from rheostat._client.engine import connect

_LEAST_WIDTH, _MOST_WIDTH = 72, 132


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="show steering, capture and a causal trace",
        description="Steer the tone of texts, show captured rows, and draw a causal trace.",
        example="rheostat demo --out demo.png",
    )
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="server to use (default: start one with the bundled model, and stop it afterwards)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="file of the heatmap (default: demo.png)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the three parts, one after the other."""
    if args.target is None:
        need_server("the demo, unless --target names a server,")
    _check_picture(args.out)
    with demo_server() if args.target is None else nullcontext(args.target) as target:
        if args.target is not None:
            with connect(target) as engine, Phase(f"waiting for {target}"):
                engine.wait_until_ready()
        asyncio.run(_show(target, args.out))
    return 0


def _check_picture(path: Path) -> None:
    """Raise CommandError if no picture can be written to the file, before the server starts."""
    need_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FigureCanvasBase.get_supported_filetypes():
        raise CommandError(f"{path} does not end like a picture: .png, .pdf, .svg, ...", 2)
    check_writable(path, force=True)


async def _show(target: str, out: Path) -> None:
    async with aio.connect(target) as engine:
        model = await engine.model()
        print(f"\n{model}\n")

        with Phase("1. tone: making a vector and continuing three prompts with it"):
            tone = await _tone.make_tone(engine, model.layer_count)
        print(
            f"\n{_tone.NAME} = mean(joyful) - mean(gloomy) of {tone.row.site}, "
            f"norm {tone.row.norm:.3g}, beside a stream of norm {tone.row.stream_norm:.3g}\n"
        )
        print(_columns(tone))
        print(f"\nWhat was done to the last one:\n{tone.strongest.receipt}\n")

        with Phase("2. capture: every layer of a prompt with a fact"):
            fact = await _trace.find_fact(engine, model)
        print(f"\nclean:   {fact.clean!r} -> {fact.answers[0]!r}")
        print(f"corrupt: {fact.corrupt!r} -> {fact.answers[1]!r}")
        for (point, layer), rows in fact.clean_run.activations.items():
            if layer in (0, model.layer_count - 1):
                print(f"  {point}[{layer}]: {rows.dtype} {list(rows.shape)}")
        print(f"\n{fact.clean_run.receipt}\n")

        with Phase("3. causal trace: one row at a time of the corrupt prompt made clean") as phase:
            result = await _trace.trace(
                engine, fact, lambda done, total: phase.note(f"{done} of {total} cells")
            )
        _trace.draw(result, fact, model.name, out)
        print(f"\nThe fact that makes it {fact.answers[0]} is carried by")
        for line in _trace.peaks(result):
            print(f"  {line}")
        print(f"\nwrote {out}")


def _columns(tone: _tone.Tone) -> str:
    width = min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)
    column = width // len(_tone.DOSES) - 2
    titles = [f"{dose:+g} x joy" if dose else "baseline" for dose in _tone.DOSES]
    lines = ["  ".join(title.ljust(column) for title in titles).rstrip()]
    lines.append("  ".join("-" * column for _ in titles))
    for prompt, texts in tone.texts.items():
        cells = [textwrap.wrap(f"{prompt}{text}", column) or [""] for text in texts]
        for row in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(column) for part in row).rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()
