"""A PI controller that holds what a probe reads at a set point, by a gain for every token.

    rheostat serve demo                  # in another terminal
    python examples/hold_set_point.py

A session steers with two interventions: the tone vector, and its opposite. Both begin with a gain
of 0. The client reads what a probe reads of each token, and answers with new gains. The probe reads
behind the steered layer, so the loop is closed. The numbers of a text change from word to word;
the controller therefore holds their mean, with the proportional part on a moving average.
The picture shows the mean of the last tokens and the gain, for several set points, and what the
same text does without a controller.
"""

import argparse
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import dose_response
import numpy as np

import rheostat

STEERED, READ = 3, 4
SET_POINTS = (-3.0, 0.0, 3.0)
TOKENS, SETTLED = 400, 150
"""Length of a text; the tokens after which the error is measured."""
PROMPT = "My day was"
SHOWN = 40
"""Tokens whose mean the picture shows."""


@dataclass
class Controller:
    """A PI controller. It gives one number: joyful above 0, gloomy below."""

    set_point: float
    proportional: float = 0.2
    integral: float = 0.015
    memory: float = 0.9
    """Of the moving average, for each token."""
    least: float = -1.5
    most: float = 1.5
    _mean: float | None = field(default=None, init=False)
    _sum: float = field(default=0.0, init=False)

    def next(self, reading: float) -> float:
        """The output after another reading. The integral stops at the limits (anti-windup)."""
        mean = reading if self._mean is None else self._mean
        self._mean = self.memory * mean + (1 - self.memory) * reading
        error = self.set_point - self._mean
        self._sum = float(np.clip(self._sum + self.integral * error, self.least, self.most))
        return float(np.clip(self._sum + self.proportional * error, self.least, self.most))


class Held(NamedTuple):
    """A text under a controller."""

    text: str
    readings: np.ndarray
    """One for each generated token that was read, float32 [tokens]."""
    outputs: np.ndarray
    """What the controller gave after each of them, [tokens]."""
    latencies: np.ndarray
    """Positions from a reading to the first row on which its gain acted, int [gains]."""

    @property
    def mean(self) -> float:
        """Mean of the readings after the controller has settled."""
        return float(self.readings[SETTLED:].mean())


def make_parts(engine: rheostat.Engine) -> tuple[rheostat.Probe, list[rheostat.Intervention]]:
    """The probe, joyful above 0, and the vector with its opposite."""
    cues = dose_response.CUES
    glad = [f"{cue} {beginning}" for cue in cues for beginning in dose_response.BEGINNINGS]
    sad = [f"{cue} {beginning}" for cue in cues.values() for beginning in dose_response.BEGINNINGS]
    engine.vectors.derive(glad, sad, points="resid_post", layers="all", name="hold/joy")
    joy = rheostat.named("hold/joy")
    probe = rheostat.probe(
        joy, points="resid_post", layers=READ, normalise="unit", where="generated", name="tone"
    )
    push = joy.at(points="resid_post", layers=STEERED)
    return probe, [push * 1.0, push * -1.0]


def hold(
    engine: rheostat.Engine,
    probe: rheostat.Probe,
    steering: list[rheostat.Intervention],
    controller: Controller | None,
    seed: int = 0,
) -> Held:
    """Generates a text under a controller; without one both gains stay 0."""
    readings, outputs = list[float](), list[float]()
    read_at: dict[int, int] = {}
    latencies = list[int]()
    with engine.session(
        PROMPT,
        steering=steering,
        probes=probe,
        max_tokens=TOKENS,
        seed=seed,
        temperature=1,
        ignore_eos=True,
    ) as session:
        session.gain(0.0)
        for event in session:
            if isinstance(event, rheostat.UpdateApplied) and event.update_id in read_at:
                acts = event.first_positions.get(0)
                if acts is not None:
                    latencies.append(acts - read_at[event.update_id])
            if not isinstance(event, rheostat.Signals):
                continue
            output = 0.0
            for reading in event[probe].tolist():
                readings.append(reading)
                output = 0.0 if controller is None else controller.next(reading)
                outputs.append(output)
            if controller is not None and len(event):
                with suppress(rheostat.Refused):  # the request has ended
                    read_at[session.gain(max(output, 0.0), [0])] = int(event.positions[-1])
                    session.gain(max(-output, 0.0), [1])
        text = session.result().text
    return Held(text, np.array(readings), np.array(outputs), np.array(latencies, int))


def joyful_share(text: str) -> str:
    """Joyful words, of all words that have a tone."""
    share = dose_response.joyful_share([text])
    return "-" if np.isnan(share) else f"{share:.0%}"


def draw(found: dict[str, Held], path: Path) -> None:
    """The readings above, the output of the controller below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(
        f"demo model: a PI controller holds what a probe reads at layer {READ},\n"
        f"by the gain of a tone vector at layer {STEERED}, changed with every token"
    )
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    window = np.ones(SHOWN) / SHOWN
    colours = ("gray", "tab:red", "tab:blue", "tab:green")
    for colour, (name, held) in zip(colours, found.items(), strict=True):
        smooth = np.convolve(held.readings, window, "valid")
        where = np.arange(len(smooth)) + SHOWN - 1
        above.plot(where, smooth, color=colour, label=f"{name}: {held.mean:+.2f} on average")
        if name != "no controller":
            above.axhline(float(name), color=colour, linestyle=":", linewidth=1)
            below.plot(held.outputs, color=colour, linewidth=0.8)
    above.axvline(SETTLED, color="lightgray", zorder=0)
    above.set_ylabel(f"reading, mean of {SHOWN} tokens\njoyful above, gloomy below")
    above.legend(
        title=f"set point: mean from token {SETTLED} on", fontsize=8, ncols=4, loc="upper center"
    )
    above.set_ylim(-6, 8)
    below.set(ylabel="the controller's output,\nin tone vectors", xlabel="generated token")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Holds each set point, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="default: the environment variable RHEOSTAT_TARGET, or else localhost:50051",
    )
    parser.add_argument("--out", type=Path, default=Path("set-point.png"))
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    args = parser.parse_args()
    with rheostat.connect(args.target) as engine:
        engine.wait_until_ready()
        probe, steering = make_parts(engine)
        found = {"no controller": hold(engine, probe, steering, None)}
        for point in SET_POINTS:
            found[f"{point:+.1f}"] = hold(engine, probe, steering, Controller(point))
    print("set point      mean  joyful words  positions until a gain acts: median, p99, most")
    table = {}
    for name, held in found.items():
        late = held.latencies
        spread = (
            [float(np.quantile(late, q, method="higher")) for q in (0.5, 0.99, 1)]
            if len(late)
            else []
        )
        joyful = joyful_share(held.text)
        figures = ", ".join(f"{number:.0f}" for number in spread)
        print(f"{name:13} {held.mean:+.2f}  {joyful:>12}  {figures}")
        table[name] = {
            "mean": held.mean,
            "joyful": joyful,
            "tokens": len(held.readings),
            "gains": len(late),
            "positions": spread,
        }
    if args.json is not None:
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    try:
        draw(found, args.out)
    except ModuleNotFoundError:
        print("for the picture: pip install matplotlib")
    else:
        print(f"wrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except rheostat.RheostatError as error:  # in one line, as on the command line
        raise SystemExit(str(error)) from None
