"""A linear probe that reads the tone of a text while the text is generated.

    rheostat serve demo --sink disk=filesystem:root=/tmp/captures      # in another terminal
    python examples/live_probe.py --root /tmp/captures

1. Store. Joyful and gloomy sentences are each followed by "The show was". The row of that last
   token goes to a sink, at every layer.
2. Train. The rows are read back from the sink's files. Each layer gets a ridge regression from row
   to tone, and sentences with words that it never saw say which layer is best.
3. Watch. A subscription reads the best layer while other requests generate, at tokens whose next
   word may have a tone. The server projects each row on the probe's weights, so one number per
   token travels. With matplotlib the readings are drawn.
"""

import argparse
import threading
import uuid
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

import rheostat
from rheostat import captures, positions, token_ids

SUBJECTS = ("My day was", "The party was", "My trip was", "The concert was", "My week was")
TONES = {
    1: "wonderful lovely fantastic brilliant delightful perfect splendid marvellous beautiful "
    "glorious great charming",
    -1: "terrible dreadful miserable horrible bleak grim dismal hopeless ghastly wretched bad "
    "painful",
}
NEXT = " The show was"
WATCHED = ("I am so happy. My day was", "I am so sad. My day was")
BEFORE = (" was", " feel")
"""Words at which the probe reads, because a word of either tone may follow."""
UNSEEN = 4
"""Words of each tone that are kept for testing."""

Rows = npt.NDArray[np.float32]


def sentences() -> dict[str, tuple[int, bool]]:
    """Tone of each sentence, and whether its word is kept for testing."""
    return {
        f"{subject} {word}.": (tone, number < UNSEEN)
        for tone, words in TONES.items()
        for number, word in enumerate(words.split())
        for subject in SUBJECTS
    }


def store(engine: rheostat.Engine, root: str) -> tuple[captures.StoredCaptures, dict[str, str]]:
    """Stores the row after every sentence at every layer; gives the sentence of each request."""
    tag = f"tone-{uuid.uuid4().hex[:8]}"
    keep = rheostat.Capture(
        "resid_post", where=positions(-1), to=rheostat.Sink("disk", tag=tag, layout="sharded")
    )
    texts = {}
    for text in sentences():
        out = engine.generate(text + NEXT, capture=keep, max_tokens=1, temperature=0)
        texts[out.request_id] = text
    return captures.open_captures(root, tag=tag), texts


def fit(rows: Rows, tones: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ridge regression: weights [width + 1], the last of which is the offset."""
    mean = rows.mean(axis=0)
    centred = (rows - mean).astype(np.float64)
    ridge = 0.01 * np.trace(centred.T @ centred) / rows.shape[1]
    weights = np.linalg.solve(
        centred.T @ centred + ridge * np.eye(rows.shape[1]), centred.T @ (tones - tones.mean())
    )
    return np.append(weights, tones.mean() - mean @ weights)


def score(rows: Rows, probe: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the probe says of each row: about 1 for joyful ones, -1 for gloomy ones."""
    found: npt.NDArray[np.float64] = rows @ probe[:-1] + probe[-1]
    return found


def train(
    stored: captures.StoredCaptures, texts: dict[str, str], layer: int
) -> tuple[npt.NDArray[np.float64], float]:
    """A probe of one layer, and its share of right answers about words that it has not seen."""
    known = sentences()
    rows, tones, unseen = [], [], []
    for batch in stored.rows("resid_post", layer):
        rows.append(batch.values)
        for index in batch.request_index:
            tone, kept = known[texts[batch.requests[index].request_id]]
            tones.append(tone)
            unseen.append(kept)
    data, wanted, test = np.concatenate(rows), np.array(tones, np.float64), np.array(unseen)
    probe = fit(data[~test], wanted[~test])
    return probe, float((np.sign(score(data[test], probe)) == wanted[test]).mean())


Readings = dict[str, list[tuple[int, float]]]
"""Position and reading, by request."""


def watch(engine: rheostat.Engine, layer: int, probe: npt.NDArray[np.float64]) -> Readings:
    """Reads the probe on requests of other threads while they generate."""
    readings: Readings = defaultdict(list)
    run = uuid.uuid4().hex
    watched = [engine.tokenize(f"It{word}").token_ids[-1] for word in BEFORE]
    weights = probe[None, :-1].astype(np.float32)  # [1, width]: one direction
    wanted = rheostat.Capture("resid_post", [layer], token_ids(*watched), projection=weights)
    with engine.subscribe(capture=wanted, labels={"probe": run}) as subscription:
        said: dict[str, str] = {}

        def generate(name: str, text: str) -> None:
            labels = {"probe": run}
            out = engine.generate(
                text, request_id=name, labels=labels, max_tokens=48, temperature=0
            )
            said[name] = text + out.text

        others = [
            threading.Thread(target=generate, args=(f"{name}-{run[:6]}", text))
            for name, text in zip(("happy", "sad"), WATCHED, strict=True)
        ]
        for other in others:
            other.start()
        ended = 0
        for event in subscription:
            if isinstance(event, rheostat.CapturedRows):
                values = event.values[0, :, 0] + probe[-1]
                for position, value in zip(event.positions, values, strict=True):
                    bar = ("+" if value > 0 else "-") * min(20, round(abs(value) * 10))
                    readings[event.request_id].append((int(position), float(value)))
                    where = f"{event.request_id}, position {position}"
                    print(f"{where:24} {value:+.2f} {bar}", flush=True)
            elif isinstance(event, rheostat.EndOfRequest):
                print(f"{event.request_id} ended: {event.row_count} rows", flush=True)
                ended += 1
                if ended == len(WATCHED):
                    break
        for other in others:
            other.join()
    for name, text in sorted(said.items()):
        print(f"{name}: {text}")
    return readings


def draw(model: str, layer: int, readings: Readings, path: Path) -> None:
    """A line per request."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, style in zip(sorted(readings), ("o-", "s--"), strict=False):
        where, values = zip(*sorted(readings[name]), strict=True)
        axes.plot(where, values, style, label=name)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(
        title=f"{model}, layer {layer}: what a probe reads before a word of either tone",
        xlabel="position of the token in its request",
        ylabel="reading: about 1 is joyful, -1 gloomy",
    )
    axes.grid(alpha=0.3)
    axes.legend(title="request", loc="center left")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Stores, trains and watches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="default: the environment variable RHEOSTAT_TARGET, or else localhost:50051",
    )
    parser.add_argument("--root", required=True, help="folder of the server's sink: its root=")
    parser.add_argument("--out", type=Path, default=Path("live-probe.png"))
    arguments = parser.parse_args()
    with rheostat.connect(arguments.target) as engine:
        if "disk" not in {sink.name for sink in engine.sinks()}:
            parser.error(
                "the server has no sink called disk; end it, and start one with\n"
                f"  rheostat serve demo --sink disk=filesystem:root={arguments.root}"
            )
        stored, texts = store(engine, arguments.root)
        print(f"{len(texts)} sentences stored")
        found = {}
        model = engine.model()
        for layer in range(model.layer_count):
            found[layer] = train(stored, texts, layer)
            print(f"layer {layer}: {found[layer][1]:.0%} of sentences with unseen words right")
        best = max(found, key=lambda layer: (found[layer][1], layer))
        print(f"watching layer {best}")
        readings = watch(engine, best, found[best][0])
    try:
        draw(model.name, best, readings, arguments.out)
    except ModuleNotFoundError:
        print("for the picture: pip install matplotlib")
    else:
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    try:
        main()
    except rheostat.RheostatError as error:  # in one line, as on the command line
        raise SystemExit(str(error)) from None
