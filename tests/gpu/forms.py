"""Rows in every form from a GPU, against rows as they are of the same prompt in the same batch."""

from typing import Any

import numpy as np
from offline import OfflineEngine, bfloat16_to_float32
from verdicts import ROUNDED, Lines, Verdict, at_most, equal

from rheostat_engine import Capture, Codec, Directions, Plan, RowEncoding
from rheostat_wire.projection import projection_matrix

PROMPT = ((0, 40),)
SEED = 2**64 - 1


def encodings(digest: bytes, kept: int) -> dict[str, RowEncoding | None]:
    """Every coding, and a projection."""
    return {
        "raw": None,
        "float16": RowEncoding(Codec.CAST, "float16"),
        "full8": RowEncoding(Codec.FULL8),
        "rp8": RowEncoding(Codec.RP8, kept=kept, seed=SEED),
        "topk8": RowEncoding(Codec.TOPK8, kept=kept),
        "projection": RowEncoding(
            Codec.CAST, "float32", directions=Directions((digest,) * 2, (0, 1))
        ),
    }


def decoded(encoding: RowEncoding, rows: Any) -> tuple[Any, Any]:
    """Numbers of rows in a form, and how far each may be off: [n, numbers] and [n, 1]."""
    if encoding.codec is Codec.CAST:
        kind = np.float16 if encoding.dtype == "float16" else np.float32
        return rows.view(kind).astype(np.float64), np.zeros((len(rows), 1))
    scales, offsets = rows[:, :8].copy().view("<f4").astype(np.float64).T[:, :, None]
    codes = rows[:, 8 + (4 * encoding.kept if encoding.codec is Codec.TOPK8 else 0) :]
    return offsets + scales * codes, scales / 2


def wanted(encoding: RowEncoding, rows: Any, found: Any, vector: Any) -> Any:
    """What the numbers should be, in float64."""
    if encoding.directions is not None:
        return rows @ vector.T.astype(np.float64)
    if encoding.codec is Codec.RP8:
        return rows @ projection_matrix(encoding.kept, rows.shape[1], SEED).T.astype(np.float64)
    if encoding.codec is Codec.TOPK8:
        indices = found[:, 8 : 8 + 4 * encoding.kept].copy().view("<u4").astype(np.int64)
        return np.take_along_axis(rows, indices, axis=1)
    return rows


def check_forms(
    engine: OfflineEngine,
    digest: bytes,
    vector: Any,
    site: int,
    prompt: list[int],
    sampling: dict[str, Any],
) -> Lines:
    """Rows of one prompt in every form at once, and the bytes that left."""
    every = encodings(digest, vector.shape[1] // 8)
    before = engine.stats()
    plans = [Plan("", (), (Capture((site,), PROMPT, encoding),)) for encoding in every.values()]
    outcomes = engine.run([prompt] * len(plans), plans, **sampling)
    after = engine.stats()
    raw = bfloat16_to_float32(outcomes[0].stream(site)).astype(np.float64)
    size = np.abs(raw).max(axis=1, keepdims=True)
    count, width = raw.shape
    results: dict[str, Verdict] = {}
    for (name, encoding), outcome in zip(every.items(), outcomes, strict=True):
        if encoding is None:
            continue
        found = outcome.stream(site)
        values, error = decoded(encoding, found)
        want = wanted(encoding, raw, found, vector)
        # Rows of one batch may differ by the rounding of the stream.
        reach = size if values.shape[1] == width else np.linalg.norm(raw, axis=1, keepdims=True)
        if encoding.directions is not None:
            reach = reach * np.linalg.norm(vector, axis=1).max()
        over = (np.abs(values - want) - error) / reach
        results[f"{name}: worst difference beyond the stated error"] = at_most(over.max(), ROUNDED)
    left = sum(2 * width if one is None else one.row_bytes(width) for one in every.values())
    results["bytes that left the device"] = equal(
        after["left_bytes"] - before["left_bytes"], count * left
    )
    results["rows that left whole though wanted in a form"] = equal(
        after["plain_rows"] - before["plain_rows"], 0
    )
    return results
