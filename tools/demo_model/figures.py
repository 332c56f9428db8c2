"""The measured figures as a Markdown section, put between marks into the pages that quote them.

The section holds nothing that differs between two runs of the same training.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from demo_model.recall import Corruption, Recall, Trace
from demo_model.steered import NEUTRAL_PROMPTS, NEW_TOKENS, SAMPLES, Dose

BEGIN, END = "<!-- figures: written by tools/train_demo_model.py -->", "<!-- end of figures -->"


class Figures(NamedTuple):
    """Everything that the training script measures."""

    parameters: int
    loss: float
    recalls: list[Recall]
    right_in_bfloat16: int
    chat: tuple[int, int]
    """Chat questions about facts answered exactly, and asked."""
    corruption: Corruption
    traces: list[Trace]
    edges: tuple[int, ...]
    losses: list[float]
    tone_layer: int
    tone_norm: float
    """Norm of the difference of means at ``tone_layer``."""
    stream_norm: float
    """Mean norm of ``resid_post`` at ``tone_layer``."""
    doses: list[Dose]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _recall_table(recalls: list[Recall]) -> str:
    rows = [
        [r.relation, f"{r.wording.replace('{s}', '…')}", f"{r.right}/{r.asked}", f"{r.margin:.1f}"]
        for r in recalls
    ]
    return _table(["relation", "wording", "right", "smallest lead of the logit"], rows)


def _trace_table(traces: list[Trace]) -> str:
    layers = len(traces[0].recovered)
    rows = []
    for layer in range(layers):
        subject = [float(t.recovered[layer, t.changed].max()) for t in traces]
        last = [float(t.recovered[layer, -1]) for t in traces]
        regained = sum(bool(t.regained[layer, t.changed].any()) for t in traces)
        regained_last = sum(bool(t.regained[layer, -1]) for t in traces)
        rows.append(
            [
                str(layer),
                f"{sum(subject) / len(subject):.2f}",
                f"{regained}/{len(traces)}",
                f"{sum(last) / len(last):.2f}",
                f"{regained_last}/{len(traces)}",
            ]
        )
    head = ["layer", "best subject token", "answer is back", "last token", "answer is back"]
    return _table(head, rows)


def _dose_table(doses: list[Dose]) -> str:
    rows = [
        [
            f"{d.amount:+g}",
            f"{d.joy:.0%} / {d.gloom:.0%}",
            f"{d.greedy_joy:.0%} / {d.greedy_gloom:.0%}",
            f"{d.surprise:.2f}",
            f"{d.facts:.1%}",
            d.example,
        ]
        for d in doses
    ]
    head = ["dose", "sampled joy / gloom", "greedy joy / gloom", "nats", "facts right", "greedy"]
    return _table(head, rows)


def section(figures: Figures) -> str:
    """The Markdown section, marks included."""
    right = sum(r.right for r in figures.recalls)
    asked = sum(r.asked for r in figures.recalls)
    corruption = figures.corruption
    reach = ", ".join(
        f"{loss:.2f} from {low} to {high - 1}"
        for (low, high), loss in zip(pairwise(figures.edges), figures.losses, strict=True)
    )
    paragraphs = (
        f"{figures.parameters:,} parameters; loss at the end of training {figures.loss:.3f} nats "
        "per token. All below is measured on the stored weights in float32 with Hugging Face "
        "transformers.",
        f"**Facts.** {right} of {asked} right in float32, {figures.right_in_bfloat16} in "
        "bfloat16. When another subject of equal length and with another answer takes the place "
        f"of the right one, {corruption.changed} of {corruption.pairs} answers change, and "
        f"{corruption.follows} become the other subject's own. In chat, {figures.chat[0]} of "
        f"{figures.chat[1]} questions get exactly the right sentence.",
        _recall_table(figures.recalls),
        "**Where a fact sits.** Clean minus corrupted `resid_post` added at one (layer, token) "
        "of the corrupted run: recovered fraction of the logit difference between the two "
        f"answers, mean of {len(figures.traces)} landmarks.",
        _trace_table(figures.traces),
        f"**Tone.** Mean joyful minus mean gloomy `resid_post` of layer {figures.tone_layer} at "
        f"the last token of cued prompts, divided by its norm ({figures.tone_norm:.1f}; the "
        f"stream's is {figures.stream_norm:.1f}), times the dose, added at every token. "
        f"{len(NEUTRAL_PROMPTS)} neutral prompts, {NEW_TOKENS} new tokens, {SAMPLES} samples at "
        "temperature 1 and one greedy text each; the words of the two moods are counted. "
        "Nats: surprise per token of the samples to the unsteered model under a cue of their "
        "mood; near the value at dose 0 the text is as well-formed as the model's own.",
        _dose_table(figures.doses),
        f"**Reach.** Nats per token by position, on unseen packed text: {reach}.",
    )
    return "\n\n".join((BEGIN, *paragraphs, END))


def write(page: Path, figures: Figures) -> None:
    """Replace what stands between the marks in ``page``; ValueError where there are none."""
    text = page.read_text(encoding="utf-8")
    before, rest = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
    page.write_text(before + section(figures) + rest, encoding="utf-8")
