"""How much of a vector turns a text, at which layer, and what it costs: a dose-response curve.

    rheostat serve demo                   # in another terminal
    python examples/dose_response.py

The server derives one tone vector per layer from joyful and gloomy prompts. Each is then added to
every token at that layer, in doses that are norms of the stream there, so layers can be compared.
What it does is the share of joyful words among the tonal words of sampled texts; what it costs, the
facts that the model still knows.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

import rheostat
from rheostat import aio

CUES = {
    "I am so happy.": "I am so sad.",
    "I am full of joy.": "I am full of sorrow.",
    "I love my life.": "I hate my life.",
    "What wonderful news!": "What terrible news!",
    "Everything is great.": "Everything is bad.",
}
BEGINNINGS = ("My day was", "I feel", "The party was", "My trip was")
NEUTRAL = ("My week was", "The weather today is", "The concert was", "My sister feels")
FACTS = {
    "The capital of France is": " Paris", "The capital of Italy is": " Rome",
    "The capital of Spain is": " Madrid", "The capital of Japan is": " Tokyo",
    "The capital of Greece is": " Athens", "The capital of Egypt is": " Cairo",
    "The capital of Norway is": " Oslo", "The capital of Poland is": " Warsaw",
}  # fmt: skip
TONES = (
    "wonderful lovely fantastic brilliant delightful perfect splendid marvellous beautiful "
    "glorious great charming sunny bright warm golden mild happy cheerful joyful delighted "
    "grateful hopeful excited proud blessed merry joy laughter hope love delight happiness "
    "sunshine pleasure laughed danced sang smiled cheered celebrated",
    "terrible dreadful miserable horrible bleak grim dismal hopeless ghastly wretched bad "
    "painful rainy dark cold stormy foggy sad gloomy lonely worried tired empty ashamed afraid "
    "broken sorrow grief despair fear pain misery tears darkness cried argued complained sighed "
    "wept suffered",
)
JOYFUL, GLOOMY = (frozenset(words.split()) for words in TONES)
DOSES = (-1.0, -0.7, -0.5, -0.35, -0.2, -0.1, 0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
SAMPLES, TOKENS, AT_ONCE = 8, 12, 32


def joyful_share(texts: Sequence[str]) -> float:
    """Joyful words, as a fraction of all words that have a tone; NaN where none has."""
    words = [word.strip(".!,?") for text in texts for word in text.split()]
    tonal = [word in JOYFUL for word in words if word in JOYFUL | GLOOMY]
    return sum(tonal) / len(tonal) if tonal else float("nan")


async def measure(
    engine: aio.Engine, steering: rheostat.Add, limit: asyncio.Semaphore
) -> tuple[float, float]:
    """The joyful share of sampled texts, and the fraction of facts that come out right."""

    async def ask(prompt: str, **options: Unpack[rheostat.GenerateOptions]) -> list[str]:
        options["steering"] = steering
        async with limit:
            out = await engine.generate(prompt, **options)
        return [sample.text for sample in out.samples]

    told = [ask(prompt, max_tokens=TOKENS, n=SAMPLES, seed=0) for prompt in NEUTRAL]
    asked = [ask(prompt, max_tokens=1, temperature=0) for prompt in FACTS]
    texts, answers = await asyncio.gather(asyncio.gather(*told), asyncio.gather(*asked))
    share = joyful_share([text for group in texts for text in group])
    right = sum(a == [b] for a, b in zip(answers, FACTS.values(), strict=True)) / len(FACTS)
    return share, right


async def dose_response(target: str) -> tuple[rheostat.Derivation, np.ndarray]:
    """The derivation, and [layers, doses, 2]: joyful share and facts right."""
    async with aio.connect(target) as engine:
        await engine.wait_until_ready()
        derivation = await engine.vectors.derive(
            [f"{cue} {beginning}" for cue in CUES for beginning in BEGINNINGS],
            [f"{cue} {beginning}" for cue in CUES.values() for beginning in BEGINNINGS],
            points="resid_post",
            layers="all",
            name="tone",
            description="joyful minus gloomy prompts, difference of means",
        )
        values = (await engine.vectors.get("tone")).values
        limit = asyncio.Semaphore(AT_ONCE)

        async def cell(row: int, dose: float) -> tuple[float, float]:
            made = derivation.rows[row]
            unit = values[row] * (made.stream_norm / made.norm)
            vector = rheostat.inline(unit, points=made.site.point, layers=made.site.layer)
            return await measure(engine, vector * dose, limit)

        rows = range(len(derivation.rows))
        cells = await asyncio.gather(*(cell(row, dose) for row in rows for dose in DOSES))
    return derivation, np.array(cells).reshape(len(rows), len(DOSES), 2)


def draw(derivation: rheostat.Derivation, found: np.ndarray, path: Path) -> None:
    """Two panels, a line per layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(found)))
    for panel, title in enumerate(("joyful share of tonal words", "facts still right")):
        axes = figure.add_subplot(1, 2, panel + 1)
        for made, line, colour in zip(derivation.rows, found, colours, strict=True):
            label = f"layer {made.site.layer}, {made.separation:.1f}"
            width = 3.0 if made is derivation.best else 1.2
            axes.plot(DOSES, line[:, panel], color=colour, label=label, linewidth=width)
        axes.set(
            title=title,
            xlabel="dose, in norms of the stream",
            ylabel="fraction",
            ylim=(-0.03, 1.03),
        )
        axes.grid(alpha=0.3)
    figure.axes[0].legend(title="resid_post, separation", fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="localhost:50051", metavar="HOST:PORT")
    parser.add_argument("--out", type=Path, default=Path("dose-response.png"))
    args = parser.parse_args()
    derivation, found = asyncio.run(dose_response(args.target))
    print(derivation)
    print("\njoyful share / facts right, by dose in norms of the stream")
    print("dose  " + "".join(f"{f'layer {made.site.layer}':>14}" for made in derivation.rows))
    for number, dose in enumerate(DOSES):
        shares = ("-" if np.isnan(share) else f"{share:.0%}" for share in found[:, number, 0])
        cells = (
            f"{share} / {right:.0%}"
            for share, right in zip(shares, found[:, number, 1], strict=True)
        )
        print(f"{dose:+.2f} " + "".join(f"{cell:>14}" for cell in cells))
    try:
        draw(derivation, found, args.out)
    except ModuleNotFoundError:
        print("\nfor the picture: pip install matplotlib")
    else:
        print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
