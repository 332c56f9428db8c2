"""How much of a vector turns a text, at which layer, and what it costs: a dose-response curve.

    rheostat serve demo                   # in another terminal
    python examples/dose_response.py

The server derives one tone vector per layer from joyful and gloomy prompts. Each is then added to
every token at that layer, in doses that are norms of the stream there, so layers can be compared.
What it does is the share of joyful words among the tonal words of sampled texts, with the interval
that holds 95 % of resampled texts; what it costs, the facts that the model still knows.
"""

import argparse
import asyncio
import sys
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
SAMPLES, TOKENS, AT_ONCE, RESAMPLED = 8, 12, 32, 200
COLUMNS = 8
"""Layers that the picture shows, evenly spaced, beside the best."""


def joyful_share(texts: Sequence[str]) -> float:
    """Joyful words, as a fraction of all words that have a tone; NaN where none has."""
    words = [word.strip(".!,?") for text in texts for word in text.split()]
    tonal = [word in JOYFUL for word in words if word in JOYFUL | GLOOMY]
    return sum(tonal) / len(tonal) if tonal else float("nan")


def interval(texts: Sequence[str]) -> tuple[float, float]:
    """Where the joyful share of 95 % of resampled sets of texts lies."""
    rng = np.random.default_rng(0)
    drawn = (rng.integers(0, len(texts), len(texts)) for _ in range(RESAMPLED))
    shares = [joyful_share([texts[index] for index in indices]) for indices in drawn]
    known = [share for share in shares if not np.isnan(share)]
    low, high = np.quantile(known, [0.025, 0.975]) if known else (np.nan, np.nan)
    return float(low), float(high)


async def measure(
    engine: aio.Engine, steering: rheostat.Add, limit: asyncio.Semaphore
) -> tuple[float, float, float, float]:
    """Joyful share of sampled texts, its interval, and the fraction of facts that come right."""

    async def ask(prompt: str, **options: Unpack[rheostat.GenerateOptions]) -> list[str]:
        options["steering"] = steering
        async with limit:
            out = await engine.generate(prompt, **options)
        return [sample.text for sample in out.samples]

    told = [ask(prompt, max_tokens=TOKENS, n=SAMPLES, seed=0) for prompt in NEUTRAL]
    asked = [ask(prompt, max_tokens=1, temperature=0) for prompt in FACTS]
    groups, answers = await asyncio.gather(asyncio.gather(*told), asyncio.gather(*asked))
    texts = [text for group in groups for text in group]
    right = sum(a == [b] for a, b in zip(answers, FACTS.values(), strict=True)) / len(FACTS)
    return joyful_share(texts), *interval(texts), right


async def dose_response(target: str | None) -> tuple[str, rheostat.Derivation, np.ndarray]:
    """The model, the derivation, and [layers, doses, 4]: what `measure` gives."""
    async with aio.connect(target) as engine:
        await engine.wait_until_ready()
        model = await engine.model()
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

        done = 0

        async def cell(row: int, dose: float) -> tuple[float, float, float, float]:
            nonlocal done
            made = derivation.rows[row]
            unit = values[row] * (made.stream_norm / made.norm)
            vector = rheostat.inline(unit, points=made.site.point, layers=made.site.layer)
            found = await measure(engine, vector * dose, limit)
            done += 1
            if done % len(DOSES) == 0:
                total = len(derivation.rows) * len(DOSES)
                print(f"{done} of {total} layers and doses measured", file=sys.stderr)
            return found

        rows = range(len(derivation.rows))
        cells = await asyncio.gather(*(cell(row, dose) for row in rows for dose in DOSES))
    return model.name, derivation, np.array(cells).reshape(len(rows), len(DOSES), 4)


def draw(model: str, derivation: rheostat.Derivation, found: np.ndarray, path: Path) -> None:
    """A column per layer: what its vector does, and what it costs."""
    from matplotlib.figure import Figure

    layers = len(derivation.rows)
    spaced = {round(at) for at in np.linspace(0, layers - 1, min(layers, COLUMNS))}
    shown = sorted(spaced | {derivation.rows.index(derivation.best)})
    figure = Figure(figsize=(2.0 * len(shown) + 1, 5.2), layout="constrained")
    texts = len(NEUTRAL) * SAMPLES
    figure.suptitle(
        f"{model}: what does a tone vector do to a text, by layer and dose, and at what cost?\n"
        f"{texts} sampled texts and {len(FACTS)} facts per point; bars hold 95 % of resampled texts"
    )
    panels = figure.subplots(2, len(shown), sharex=True, sharey="row", squeeze=False)
    for (above, below), row in zip(panels.T, shown, strict=True):
        made, (share, low, high, facts) = derivation.rows[row], found[row].T
        best = made is derivation.best
        errors = np.clip([share - low, high - share], 0, None)
        colour = "tab:blue" if best else "tab:gray"
        above.errorbar(DOSES, share, errors, fmt="o-", color=colour, markersize=3, elinewidth=0.8)
        below.plot(DOSES, facts * len(FACTS), "o-", color=colour, markersize=3)
        name = f"{made.site.point} {made.site.layer}" + (", best" if best else "")
        known = "-" if made.separation is None else f"{made.separation:.1f}"
        above.set_title(f"{name}\nseparation {known}", fontsize=9)
        for axes in (above, below):
            axes.axvline(0, color="lightgray", linewidth=0.8, zorder=0)
            axes.grid(alpha=0.3)
    panels[0, 0].set(ylabel="joyful share of words\nthat have a tone", ylim=(-0.03, 1.03))
    panels[1, 0].set(ylabel=f"right answers of {len(FACTS)}", ylim=(-0.3, len(FACTS) + 0.3))
    figure.supxlabel("dose, in norms of the residual stream there", fontsize=10)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="default: the environment variable RHEOSTAT_TARGET, or else localhost:50051",
    )
    parser.add_argument("--out", type=Path, default=Path("dose-response.png"))
    args = parser.parse_args()
    model, derivation, found = asyncio.run(dose_response(args.target))
    print(derivation)
    print("\njoyful share / facts right, by dose in norms of the stream")
    print("dose  " + "".join(f"{f'layer {made.site.layer}':>14}" for made in derivation.rows))
    for number, dose in enumerate(DOSES):
        shares = ("-" if np.isnan(share) else f"{share:.0%}" for share in found[:, number, 0])
        cells = (
            f"{share} / {right:.0%}"
            for share, right in zip(shares, found[:, number, 3], strict=True)
        )
        print(f"{dose:+.2f} " + "".join(f"{cell:>14}" for cell in cells))
    try:
        draw(model, derivation, found, args.out)
    except ModuleNotFoundError:
        print("\nfor the picture: pip install matplotlib")
    else:
        print(f"\nwrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except rheostat.RheostatError as error:  # in one line, as on the command line
        raise SystemExit(str(error)) from None
