"""A tone as a vector: the difference of means between joyful and gloomy prompts, at one layer.

The server derives it at the last prompt token, at ``resid_post`` of the middle layer. The vector is
added there to every token. Method: Marks and Tegmark (2023); Rimsky et al. (2024).
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from rheostat import aio
from rheostat._responses.results import Generation
from rheostat._steering.derivations import DerivedRow

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

    row: DerivedRow
    """The site and the norms of the vector's row."""
    texts: dict[str, list[str]]
    """Continuations by prompt, in the order of `DOSES`."""
    strongest: Generation
    """A generation at the last dose, for its receipt."""


async def make_tone(engine: aio.Engine, layers: int) -> Tone:
    """Make the vector, store it as `NAME`, and continue every neutral prompt at every dose."""

    def prompts(cues: tuple[str, ...]) -> list[str]:
        return [f"{cue} {beginning}" for cue in cues for beginning in BEGINNINGS]

    derived = await engine.vectors.derive(
        prompts(JOYFUL),
        prompts(GLOOMY),
        points="resid_post",
        layers=layers // 2,
        name=NAME,
        description="difference of means, joyful minus gloomy prompts",
    )

    outs = await asyncio.gather(
        *(
            engine.generate(
                prompt,
                steering=[derived.vector * dose] if dose else None,
                max_tokens=_NEW_TOKENS,
                temperature=0,
            )
            for prompt in NEUTRAL
            for dose in DOSES
        )
    )
    texts: dict[str, list[str]] = {prompt: [] for prompt in NEUTRAL}
    for number, out in enumerate(outs):
        texts[NEUTRAL[number // len(DOSES)]].append(out.text)
    return Tone(derived.rows[0], texts, outs[-1])
