"""What the checks on GPUs run, and how two runs of it are compared."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent.parent / "integration" / "engine"))

from offline import Outcome, bfloat16_to_float32

from rheostat_engine import OPEN_END, Act, Band, Kind

EVERYWHERE = ((0, OPEN_END),)
PROMPT = ((0, 40),)
VECTOR = hashlib.sha256(b"check").digest()


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Different prompts of random tokens, always the same ones."""
    rng = np.random.default_rng(7)
    return rng.integers(3, vocabulary, (count, length)).tolist()


def same(one: Outcome, other: Outcome) -> bool:
    """Whether tokens and log-probabilities are equal in every bit."""
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def agreed(one: Outcome, other: Outcome) -> int:
    """One past the last position up to which two runs of a prompt read the same tokens."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    return PROMPT[0][1] + next((i for i, (a, b) in pairs if a != b), len(one.token_ids) - 1)


def rows_of(outcome: Outcome, site: int, end: int) -> npt.NDArray[np.float32]:
    """Captured rows of a site at the positions below `end`, [end, W]."""
    rows = np.stack([outcome.rows[site][position] for position in range(end)])
    return bfloat16_to_float32(rows) if rows.dtype == np.uint16 else rows


def difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Of some rows, relative to the second's size."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def whole(outcome: Outcome, sites: tuple[int, ...]) -> bool:
    """Whether every position was captured once, at exactly these sites."""
    positions = list(range(PROMPT[0][1] + len(outcome.token_ids) - 1))
    found = {site: sorted(rows) for site, rows in outcome.rows.items()}
    return found == dict.fromkeys(sites, positions) and not outcome.duplicates


def acts_at(site: int) -> dict[str, Act]:
    """One act of every kind at a site, on the prompt."""
    one, both = ((site, (0,)),), ((site, (0, 1)),)
    return {
        "add": Act(Kind.ADD, (VECTOR,), one, PROMPT, 0.5),
        "norm_add": Act(Kind.NORM_ADD, (VECTOR,), one, PROMPT, 0.25),
        "ablate two": Act(
            Kind.PULL,
            (VECTOR, VECTOR),
            both,
            PROMPT,
            bands=(Band(0.0, 0.0, 1.0),) * 2,
            orthogonal=True,
        ),
        "clamp": Act(Kind.PULL, (VECTOR,), one, PROMPT, bands=(Band(0.1, 0.2, 0.5),)),
        "scale": Act(Kind.PULL, (VECTOR,), one, PROMPT, bands=(Band(0.0, 0.0, -2.0),)),
    }
