"""A guard of the tone: it steers back only where a text turns gloomy, and stops one that stays so.

    rheostat serve demo                # in another terminal
    python examples/tone_guard.py

1. Fit. Joyful and gloomy prompts give a tone vector and two probes: one that reads before the
   layer that is steered, and one that reads after it.
2. Guard. A gate adds the vector only at tokens at which the first probe reads gloom. A rule stops
   a text if the second probe reads gloom nevertheless.
3. Compare. Texts without the guard, with it, and with the vector at every token; and whether
   cheerful texts and facts keep every bit.
4. Draw. What the second probe reads of a text that turns gloomy, without the guard and with it.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import dose_response

import rheostat

CUES, BEGINNINGS, FACTS = dose_response.CUES, dose_response.BEGINNINGS, dose_response.FACTS
JOYFUL = dose_response.JOYFUL | {
    "smile", "smiling", "laugh", "dance", "sing", "cheer", "hugged", "funny", "best",
}  # fmt: skip
GLOOMY = dose_response.GLOOMY | {
    "cry", "crying", "sigh", "weep", "tremble", "hide", "poor", "bitter", "worst",
}  # fmt: skip
READ, STEERED, CHECKED = 2, 3, 5
"""Layers: of the gate's probe, of the vector, and of the rule's probe."""
NEUTRAL = (
    "My day was", "The weather today is", "I feel", "The party was", "My week was",
    "The concert was", "My sister feels", "My trip was", "The show was", "My morning was",
    "The wedding was", "My brother feels", "My holiday was", "The game was", "My lesson was",
    "The meeting was",
)  # fmt: skip
SAMPLES, TOKENS, AT_ONCE = 8, 40, 8
SHOWN = 5
"""Gloomy words of the text in the picture."""


class Guard(NamedTuple):
    """The parts of the guard."""

    before: rheostat.Probe
    """Reads before the steered layer. Above 0: gloomy."""
    after: rheostat.Probe
    """Reads after it."""
    push: rheostat.Intervention
    """From the mean of the gloomy prompts to that of the joyful ones, at every token."""
    gated: rheostat.Intervention
    """The same, where `before` reads gloom."""
    bound: float
    """Of `after`; above it the rule stops a text."""

    def rule(self) -> rheostat.Rule:
        """Stops a text from whose next token gloom is expected."""
        return rheostat.Rule("gloom", self.after.above(self.bound), rheostat.Stop("too gloomy"))


class Tally(NamedTuple):
    """Words of texts that have a tone."""

    gloomy: int
    tonal: int
    gloomy_later: int
    """Of those that come after the first gloomy word of their text."""
    tonal_later: int


def make_guard(engine: rheostat.Engine) -> Guard:
    """Fits the probes and derives the vector from prompts of both tones."""
    glad = [f"{cue} {beginning}" for cue in CUES for beginning in BEGINNINGS]
    sad = [f"{cue} {beginning}" for cue in CUES.values() for beginning in BEGINNINGS]
    tone = engine.vectors.derive(glad, sad, points="resid_post", layers="all", name="guard/joy")

    def fit(layer: int, name: str) -> tuple[rheostat.Probe, float]:
        found = engine.conditions.fit(
            sad,
            glad,
            points="resid_post",
            layers=layer,
            pools=["last"],
            directions=["difference_of_means"],
            normalises=["unit"],
        )
        # The fitted threshold is in the middle between both sets, where neutral texts are.
        bound = found.best.threshold + tone.rows[layer].norm / 4
        where = rheostat.positions(-1) | rheostat.generated()
        return rheostat.probe(found.vector, normalise="unit", where=where, name=name), bound

    before, threshold = fit(READ, "before")
    after, bound = fit(CHECKED, "after")
    push = rheostat.named("guard/joy").at(points="resid_post", layers=STEERED)
    gate = rheostat.gate(before.above(threshold), signals=True)
    return Guard(before, after, push, push.when(gate), bound)


def words_of(text: str) -> list[str]:
    """Its words, without punctuation."""
    return [word.strip(".!,?") for word in text.split()]


def tally(texts: Iterable[str]) -> Tally:
    """Counts the words that have a tone."""
    counts = [0, 0, 0, 0]
    for text in texts:
        turned = False
        for word in words_of(text):
            if word in JOYFUL | GLOOMY:
                gloomy = word in GLOOMY
                counts[0] += gloomy
                counts[1] += 1
                counts[2] += gloomy and turned
                counts[3] += turned
                turned |= gloomy
    return Tally(*counts)


def sampled(
    engine: rheostat.Engine, prompts: Sequence[str], **options: object
) -> list[rheostat.Sample]:
    """Samples of all prompts. Every arm has the same seed, so texts are equal until steered."""

    def run(prompt: str) -> tuple[rheostat.Sample, ...]:
        common = {"n": SAMPLES, "seed": 0, "max_tokens": TOKENS, "temperature": 1}
        return engine.generate(prompt, **common, **options).samples

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [sample for samples in pool.map(run, prompts) for sample in samples]


def facts_right(engine: rheostat.Engine, steering: rheostat.Intervention | None) -> int:
    """How many of `FACTS` come right."""
    options = {"steering": steering, "max_tokens": 2, "temperature": 0}
    return sum(
        engine.generate(fact, **options).text.startswith(answer) for fact, answer in FACTS.items()
    )


def compare(engine: rheostat.Engine, guard: Guard) -> dict[str, dict[str, float]]:
    """By arm: tonal words of neutral and gloomy prompts, facts, and texts that were stopped."""
    arms: dict[str, dict[str, object]] = {
        "without": {},
        "guarded": {"steering": guard.gated},
        "guarded, and stopped": {"steering": guard.gated, "rules": guard.rule()},
        "stopped": {"rules": guard.rule()},
        "a third of the vector at every token": {"steering": guard.push * 0.3},
        "the vector at every token": {"steering": guard.push},
    }
    cued = [f"{cue} {beginning}" for cue in CUES.values() for beginning in BEGINNINGS[:3]]
    table = {}
    for name, options in arms.items():
        samples = sampled(engine, NEUTRAL, **options)
        neutral = tally(sample.text for sample in samples)
        sad = tally(sample.text for sample in sampled(engine, cued, **options))
        steering = options.get("steering")
        assert steering is None or isinstance(steering, rheostat.Intervention)
        table[name] = {
            "gloomy": neutral.gloomy,
            "tonal": neutral.tonal,
            "gloomy_later": neutral.gloomy_later,
            "tonal_later": neutral.tonal_later,
            "cued_gloomy": sad.gloomy,
            "cued_tonal": sad.tonal,
            "facts": facts_right(engine, steering),
            "texts": len(samples),
            "stopped": sum(sample.finish_reason == "rule" for sample in samples),
        }
    return table


def unchanged(engine: rheostat.Engine, guard: Guard) -> tuple[int, int]:
    """Cheerful texts and facts that keep every bit under the guard, and all of them."""
    cheerful = [f"{cue} {beginning}" for cue in CUES for beginning in BEGINNINGS]
    same = 0
    for prompt in (*cheerful, *FACTS):
        options = {"max_tokens": 16 if prompt in cheerful else 2, "temperature": 0, "logprobs": 0}
        plain = engine.generate(prompt, **options)
        out = engine.generate(prompt, steering=guard.gated, **options)
        steered = sum(site.row_count for site in out.receipt.interventions[0].sites)
        same += steered == 0 and out.logprobs == plain.logprobs
    return same, len(cheerful) + len(FACTS)


class Reading(NamedTuple):
    """A text and what was read of it."""

    prompt: str
    first: int
    """Position of the last prompt token, from whose row the first token is sampled."""
    sample: rheostat.Sample
    stopped_after: int | None
    """Tokens that the rule alone lets through; None: all."""


def readings(engine: rheostat.Engine, guard: Guard) -> tuple[Reading, Reading]:
    """The first text with `SHOWN` gloomy words, without the guard and with it."""
    probes = [guard.before, guard.after]
    options = {"n": SAMPLES, "seed": 0, "max_tokens": TOKENS, "temperature": 1, "logprobs": 0}
    for prompt in NEUTRAL:
        plain = engine.generate(prompt, probes=probes, **options).samples
        for number, sample in enumerate(plain):
            if tally([sample.text]).gloomy < SHOWN:
                continue
            steered = engine.generate(prompt, probes=probes, steering=guard.gated, **options)
            ruled = engine.generate(prompt, rules=guard.rule(), **options).samples[number]
            end = len(ruled.token_ids) if ruled.finish_reason == "rule" else None
            first = len(engine.tokenize(prompt).token_ids) - 1
            return (
                Reading(prompt, first, sample, end),
                Reading(prompt, first, steered.samples[number], None),
            )
    raise SystemExit("no text turned gloomy")


def draw(guard: Guard, pair: tuple[Reading, Reading], path: Path) -> None:
    """A panel without the guard, and one with it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(
        f"How gloomy will the next word be? What a probe at layer {CHECKED} of the demo model\n"
        f'reads before each token of "{pair[0].prompt} ...", without the guard and with it'
    )
    titles = ("without the guard", f"with it: the vector is added at layer {STEERED} where shaded")
    for axes, title, one in zip(figure.subplots(2, sharey=True), titles, pair, strict=True):
        tokens = [step.token.text for step in one.sample.logprobs]
        signals = one.sample.signals
        rows = signals.positions >= one.first
        read = signals[guard.after][rows]
        places = range(len(tokens))
        axes.plot(places, read, "o-", color="tab:blue", markersize=3, linewidth=1)
        axes.axhline(guard.bound, color="tab:red", linestyle=":", label="the rule stops above this")
        if any(column.gate for column in signals.columns):
            for place, openness in enumerate(signals.openness(0)[rows]):
                if openness:
                    axes.axvspan(place - 0.5, place + 0.5, color="tab:orange", alpha=0.3, lw=0)
        if one.stopped_after is not None:
            at = one.stopped_after - 0.5
            axes.axvline(at, color="tab:red", linewidth=1, label="the rule alone ends the text")
        axes.set_xticks(places, [token.strip() for token in tokens], rotation=90, fontsize=8)
        for label, token in zip(axes.get_xticklabels(), tokens, strict=True):
            (word,) = words_of(token) or [""]
            label.set_color(
                "tab:red" if word in GLOOMY else "tab:green" if word in JOYFUL else "dimgray"
            )
        axes.set(title=title, xlim=(-0.7, len(tokens) - 0.3))
        axes.set_ylabel("gloomy above, joyful below")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8)
    figure.supxlabel("the token that follows; red: gloomy, green: joyful", fontsize=10)
    figure.savefig(path, dpi=150)


def share(part: float, whole: float) -> str:
    """A fraction, in percent."""
    return f"{part / whole:.0%}" if whole else "-"


def main() -> None:
    """Measures, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="default: the environment variable RHEOSTAT_TARGET, or else localhost:50051",
    )
    parser.add_argument("--out", type=Path, default=Path("tone-guard.png"))
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    args = parser.parse_args()
    with rheostat.connect(args.target) as engine:
        engine.wait_until_ready()
        guard = make_guard(engine)
        table = compare(engine, guard)
        same, of = unchanged(engine, guard)
        pair = readings(engine, guard)
    print("gloomy share of words that have a tone:")
    print("all / after a text's first gloomy word / of gloomy prompts; facts right; texts stopped")
    for name, row in table.items():
        print(
            f"{name:38}{share(row['gloomy'], row['tonal']):>5}"
            f"{share(row['gloomy_later'], row['tonal_later']):>6}"
            f"{share(row['cued_gloomy'], row['cued_tonal']):>6}"
            f"{row['facts']:4.0f}/{len(FACTS)}{row['stopped']:5.0f}/{row['texts']:.0f}"
        )
    print(f"{same} of {of} cheerful texts and facts keep every bit under the guard")
    for name, one in zip(("without", "guarded"), pair, strict=True):
        print(f"{name}: {one.prompt}{one.sample.text}")
    if args.json is not None:
        found = {"arms": table, "unchanged": same, "of": of, "facts": len(FACTS)}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    try:
        draw(guard, pair, args.out)
    except ModuleNotFoundError:
        print("for the picture: pip install matplotlib")
    else:
        print(f"wrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except rheostat.RheostatError as error:  # in one line, as on the command line
        raise SystemExit(str(error)) from None
