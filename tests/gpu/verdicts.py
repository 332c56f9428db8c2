"""What a check found, what it has to be, and whether it is; needs no GPU.

Invariant: a value that is not a number is never what it has to be.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.channel.events import Dose

Float = npt.NDArray[np.floating]

SUMS = 1e-5
"""Float32 sums of some thousand terms in another order, relative to the largest."""
ROUNDED = 1e-2
"""What is rounded to bfloat16: a unit in the last place is at most 2**-7 = 0.8 % of a value."""
REORDERED = 5e-2
"""A small model's bfloat16 stream, relative, where kernels or two GPUs round in another order:
2.2e-2 was seen."""
APART = 0.15
"""How far a row lies at least from the next token's: `REORDERED` tells them apart."""
SEEN = 1.5e-2
"""The least change of a stream for `ROUNDED` to tell that an op was not done. Ablating two of 4,096
directions changes 2.2 %."""


_NAMED = 5
"""How many of those that are not what they should be are named."""


class Verdict(NamedTuple):
    """One line of a check."""

    value: object
    """What was found, as JSON can say it."""
    threshold: str
    """What it has to be."""
    ok: bool
    """Whether it is."""


Lines = Mapping[str, Verdict]
"""Verdicts by what they are about."""


def equal(value: object, wanted: object) -> Verdict:
    """Exactly what is wanted."""
    return Verdict(value, f"== {wanted}", value == wanted)


def report(value: object) -> Verdict:
    """Something that is stated, whatever it is."""
    return Verdict(value, "stated", True)


def at_most(value: float, limit: float) -> Verdict:
    """Not above a limit."""
    return Verdict(float(value), f"<= {limit:g}", bool(value <= limit))


def at_least(value: float, limit: float) -> Verdict:
    """Not below a limit."""
    return Verdict(float(value), f">= {limit:g}", bool(value >= limit))


def near(value: float, wanted: float, tolerance: float) -> Verdict:
    """Within a tolerance of what is wanted."""
    ok = bool(abs(value - wanted) <= tolerance)
    return Verdict(float(value), f"{wanted:g} +- {tolerance:g}", ok)


def each(good: Sequence[bool]) -> Verdict:
    """All of some, and there are some; the first that are not are named by where they stand."""
    found, of = sum(map(bool, good)), len(good)
    bad = [str(at) for at, one in enumerate(good) if not one][:_NAMED]
    value = f"{found}/{of}" + (f", not {', '.join(bad)}" if bad else "")
    return Verdict(value, f"all of {of}", found == of > 0)


def worst(one: Float, other: Float) -> float:
    """The largest difference, relative to the largest value; NaN if there is one."""
    return float(np.abs(one - other).max() / np.abs(one).max())


def judge_op(name: str, x: Float, got: Float, want: Float, doses: Sequence[Dose]) -> Lines:
    """Rows [n, W] and doses of an op.

    Args:
        name: what the op is called.
        x: what it was given.
        got: what it made of that.
        want: what numpy makes of that.
        doses: what was measured.
    """
    size = np.linalg.norm(want)
    moved = np.linalg.norm(want - x, axis=1)
    share = float((moved / np.linalg.norm(x, axis=1)).mean())
    relative = sum(dose.relative for dose in doses)
    return {
        f"{name}: relative change in numpy": at_least(np.linalg.norm(want - x) / size, SEEN),
        f"{name}: relative difference to numpy": at_most(
            np.linalg.norm(got - want) / size, ROUNDED
        ),
        f"{name}: rows measured": equal([dose.rows for dose in doses], [len(x)]),
        f"{name}: relative dose over numpy's": near(relative / len(x) / share, 1.0, 0.01),
    }


def write(results: Mapping[str, Lines], out: Path) -> None:
    """Writes the lines of each model, those that there are by now."""
    lines = {
        model: {line: one._asdict() for line, one in found.items()}
        for model, found in results.items()
    }
    out.write_text(json.dumps(lines, indent=1))


def conclude(
    results: Mapping[str, Lines], out: Path, seconds: Mapping[str, float] | None = None
) -> int:
    """Writes and prints the lines of each model, then a table; the status: 1 if one is not ok.

    Args:
        results: lines by model or part.
        out: where they are written as JSON.
        seconds: how long each part took, if that was measured.
    """
    write(results, out)
    for model, lines in results.items():
        for line, one in lines.items():
            word = "ok" if one.ok else "FAILED"
            print(f"{word:6} {model:10} {line}: {one.value} ({one.threshold})")
    print("\npart         ok    of  seconds")
    for model, lines in results.items():
        held = sum(one.ok for one in lines.values())
        took = (seconds or {}).get(model, 0.0)
        print(f"{model:10} {held:4d}  {len(lines):4d}  {took:7.1f}")
    verdicts = [
        (model, line, one) for model, lines in results.items() for line, one in lines.items()
    ]
    for model, line, one in verdicts:
        if not one.ok:
            print(f"FAILED {model}: {line}: {one.value} ({one.threshold})")
    good = sum(one.ok for _, _, one in verdicts)
    print(f"{good} of {len(verdicts)} as they have to be")
    return 0 if verdicts and good == len(verdicts) else 1
