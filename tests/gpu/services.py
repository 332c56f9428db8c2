"""Sweeps, noise and the lens over gRPC, on the demo model.

A patched prompt is computed in three ways: as a cell of a sweep, by the lens, and, where the patch
makes one prompt the other, as that prompt. vLLM rounds differently in each batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from verdicts import Lines, Verdict, at_least, at_most, equal

import rheostat
from rheostat_bench.served_process import served_process

CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Willis Tower is in the city of"
RIGHT = " Paris"
APART = 1.0
"""How far the prompts' log-probabilities of the answer lie apart at least, in nats."""
BATCHED = 0.25
"""Nats between two batches' log-probabilities in bfloat16, at most."""


def check_services(log: Path, options: Sequence[str]) -> Lines:
    """Starts a server of the demo model; checks sweeps, noise and the lens.

    Args:
        log: the server's log.
        options: its flags.
    """
    with served_process("demo", log, options) as server, rheostat.connect(server.target) as engine:
        found = {**check_sweep(engine), **check_noise(engine), **check_lens(engine)}
        return {**found, "runs held at the end": equal(len(engine.runs()), 0)}


def check_sweep(engine: rheostat.Engine) -> Lines:
    """A sweep over the stream's sites, each cell beside a patched prompt that the lens reads."""
    pair = rheostat.Pair(CLEAN, corrupt=CORRUPT, answer=RIGHT)
    swept = engine.sweep(pair, points=["resid_pre", "resid_post"], grades=["logprob", "rank"])
    values, ranks = swept.array("logprob"), swept.array("rank")
    clean, corrupt = swept.clean[0], swept.corrupt[0]
    last = engine.model().layer_count - 1
    one, other = swept.pairs[0].clean_token_ids, swept.pairs[0].corrupt_token_ids
    (changed,) = (i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    right = engine.tokenize(RIGHT).token_ids[-1]
    run = rheostat.Run("check")
    capture = rheostat.Capture(["resid_pre", "resid_post"], "all", where="prompt", to=run)
    engine.generate(CLEAN, capture=capture, max_tokens=1, temperature=0)
    read, read_ranks = np.full(values.shape, np.nan), np.full(values.shape, np.nan)
    for row, site in enumerate(swept.sites):
        for position in range(len(one)):
            patch = rheostat.replace(rheostat.from_run("check")).at(
                points=site.point, layers=site.layer, where=rheostat.positions(position)
            )
            lens = engine.lens(CORRUPT, layers=last, top_k=0, tokens=[right], steering=patch)
            read[row, position] = lens.logprobs[0, -1, 0]
            read_ranks[row, position] = lens.ranks[0, -1, 0]
    engine.delete_run("check")
    others = [i for i in range(len(one)) if i != changed]
    return {
        "cells with a value": equal(int(np.isfinite(values).sum()), 2 * (last + 1) * len(one)),
        "clean prompt above corrupt one, nats": at_least(clean - corrupt, APART),
        "noise of 8 baselines, nats": at_most(swept.noise[0].largest, BATCHED),
        "first layer's input at the changed token, from clean": at_most(
            abs(values[0, changed] - clean), BATCHED
        ),
        "last layer's last row, from clean": at_most(abs(values[-1, -1] - clean), BATCHED),
        "first layer's input elsewhere, from corrupt": at_most(
            np.abs(values[0, others] - corrupt).max(), BATCHED
        ),
        "last layer's other rows, from corrupt": at_most(
            np.abs(values[-1, :-1] - corrupt).max(), BATCHED
        ),
        "cells from the lens of a patched prompt, at most": at_most(
            np.abs(values - read).max(), BATCHED
        ),
        "cells whose rank is the lens's": at_least(float((ranks == read_ranks).mean()), 0.8),
    }


def check_noise(engine: rheostat.Engine) -> Lines:
    """Noise on the subject's embeddings, and the clean rows put back."""
    noise = rheostat.NoisyPrompt(
        rheostat.Noise(embedding_std=3), where=rheostat.span("Eiffel Tower"), count=3
    )
    pair = rheostat.Pair(CLEAN, corrupt=noise, answer=RIGHT)
    ends = [0, engine.model().layer_count - 1]
    swept, again = (engine.sweep(pair, layers=ends) for _ in range(2))
    values = swept.array()
    return {
        "noise lowers the answer, nats": at_least(swept.clean[0] - swept.corrupt[0], APART),
        "last layer's last row under noise, from clean": at_most(
            abs(values[-1, -1] - swept.clean[0]), BATCHED
        ),
        "last layer's other rows under noise, from corrupt": at_most(
            np.abs(values[-1, :-1] - swept.corrupt[0]).max(), BATCHED
        ),
        "the same noise again": at_most(np.abs(values - again.array()).max(), BATCHED),
    }


def check_lens(engine: rheostat.Engine) -> Lines:
    """The last layer's stream read by the lens, beside what the model says."""
    results: dict[str, Verdict] = {}
    lens = engine.lens(CLEAN, layers=engine.model().layer_count - 1, top_k=5)
    said = engine.generate(CLEAN, max_tokens=1, temperature=0, logprobs=5).logprobs[0]
    model = {one.token_id: one.logprob for one in (said.token, *said.alternatives)}
    read: dict[int, Any] = dict(
        zip(lens.top_token_ids[0, -1].tolist(), lens.top_logprobs[0, -1].tolist(), strict=True)
    )
    common = model.keys() & read.keys()
    results["likeliest tokens in common with the model"] = at_least(len(common), 4)
    results["their log-probabilities, from the model's"] = at_most(
        max((abs(model[token] - read[token]) for token in common), default=np.nan), BATCHED
    )
    made = engine.attribute(CLEAN, max(read, key=lambda token: read[token]))
    total = float(made.contributions.sum() + made.bias)
    results["sum of contributions, relative to the logit"] = at_most(
        abs(total - made.logit) / abs(made.logit), 0.05
    )
    return results
