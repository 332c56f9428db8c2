"""A tone as a vector: the difference of means between joyful and gloomy prompts, at one layer.

The rows are captured at the last prompt token, at ``resid_post`` of the middle layer. The vector is
added there to every token. Method: Marks and Tegmark (2023); Rimsky et al. (2024).
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np

from rheostat import aio
from rheostat._capture.captures import Capture
from rheostat._responses.results import Generation
from rheostat._selectors import positions
from rheostat._steering.vectors import Vector
from rheostat_wire.dtypes import FloatArray

JOYFUL = (
    "I am so happy.", "I am full of joy.", "Today is a happy day.", "I love my life.",
    "What wonderful news!", "This is the best day of my life.", "Everything is great.",
)  # fmt: skip
GLOOMY = (
    "I am so sad.", "I am full of sorrow.", "Today is a sad day.", "I hate my life.",
    "What terrible news!", "This is the worst day of my life.", "Everything is bad.",
)  # fmt: skip
BEGINNINGS = ("My day was", "I feel", "The party was", "My trip was")
"""Texts after a cue, so that the last token itself has no tone."""
NEUTRAL = ("My day was", "The weather today is", "The concert was")
"""Prompts that are continued at every dose."""
DOSES = (-0.5, 0.0, 0.5)
"""Multiples of the vector; 0 is the baseline."""
NAME = "demo/joy"
_NEW_TOKENS = 16


class Tone(NamedTuple):
    """The vector and its effect."""

    vector: Vector
    layer: int
    norm: float
    """L2 norm of the vector."""
    stream_norm: float
    """Mean L2 norm of the captured rows."""
    texts: dict[str, list[str]]
    """Continuations by prompt, in the order of `DOSES`."""
    strongest: Generation
    """A generation at the last dose, for its receipt."""


async def make_tone(engine: aio.Engine, layers: int, limit: asyncio.Semaphore) -> Tone:
    """Make the vector, store it as `NAME`, and continue every neutral prompt at every dose."""
    layer = layers // 2

    async def last_row(prompt: str) -> FloatArray:
        async with limit:
            out = await engine.generate(
                prompt,
                capture=Capture("resid_post", layer, where=positions(-1)),
                max_tokens=1,
                temperature=0,
            )
        row: FloatArray = out.activations["resid_post", layer][0]
        return row

    async def mean(cues: tuple[str, ...]) -> tuple[FloatArray, float]:
        prompts = [f"{cue} {beginning}" for cue in cues for beginning in BEGINNINGS]
        rows = np.stack(await asyncio.gather(*(last_row(prompt) for prompt in prompts)))
        return rows.mean(axis=0), float(np.linalg.norm(rows, axis=1).mean())

    (joy, joy_norm), (gloom, gloom_norm) = await asyncio.gather(mean(JOYFUL), mean(GLOOMY))
    difference = joy - gloom
    vector = await engine.vectors.put(
        difference,
        points="resid_post",
        layers=layer,
        name=NAME,
        description="difference of means, joyful minus gloomy prompts",
    )

    async def continued(prompt: str, dose: float) -> Generation:
        async with limit:
            return await engine.generate(
                prompt,
                steering=[vector * dose] if dose else None,
                max_tokens=_NEW_TOKENS,
                temperature=0,
            )

    outs = await asyncio.gather(*(continued(prompt, dose) for prompt in NEUTRAL for dose in DOSES))
    texts: dict[str, list[str]] = {prompt: [] for prompt in NEUTRAL}
    for number, out in enumerate(outs):
        texts[NEUTRAL[number // len(DOSES)]].append(out.text)
    norm = float(np.linalg.norm(difference))
    return Tone(vector, layer, norm, (joy_norm + gloom_norm) / 2, texts, outs[-1])
