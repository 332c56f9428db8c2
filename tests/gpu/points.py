"""Points that a block serves in bfloat16, and that their rows add up.

Blocks that norm what they add (OLMo-2, Gemma 3) once lost `resid_mid` in bfloat16: the probe
compared sums exactly, and bfloat16 rounds them.
"""

from typing import Any

from cases import EVERYWHERE, PROMPT, difference, rows_of, whole
from offline import OfflineEngine
from verdicts import ROUNDED, Lines, Verdict, at_most, each, equal

from rheostat_engine import Capture, Plan, Point, Site
from rheostat_engine.plan.points import site_count

SUMS_OF = {
    "resid_mid is resid_pre and attn_out": (Point.RESID_MID, Point.RESID_PRE, Point.ATTN_OUT),
    "resid_post is resid_mid and mlp_out": (Point.RESID_POST, Point.RESID_MID, Point.MLP_OUT),
}


def check_points(engine: OfflineEngine, batch: list[list[int]], sampling: dict[str, Any]) -> Lines:
    """Every point is served as in float32 on a CPU, every row comes, and rows add up.

    Args:
        engine: a sequential block's, which serves all points in float32 on a CPU.
        batch: prompts; the first ones are captured.
        sampling: of every request.
    """
    assert engine.sites is not None
    layers = engine.sites.num_layers
    results: dict[str, Verdict] = {}
    results["points that float32 serves on a CPU and this does not"] = equal(
        {point.value: why for point, why in engine.sites.refused.items()}, {}
    )
    if engine.sites.refused:
        return results
    every = tuple(range(site_count(layers)))
    plans = [
        Plan("", (), (Capture(every, EVERYWHERE),)) if i < 2 else None for i in range(len(batch))
    ]
    captured = engine.run(batch, plans, **sampling)[:2]
    results["captured requests of which every position came once"] = each(
        [whole(one, every) for one in captured]
    )
    end = PROMPT[0][1]
    for name, (total, *parts) in SUMS_OF.items():
        off = []
        for outcome in captured:
            for layer in range(layers):
                have = rows_of(outcome, Site(total, layer).index, end)
                want = sum(rows_of(outcome, Site(part, layer).index, end) for part in parts)
                off.append(difference(have, want))
        results[f"{name}: worst relative difference"] = at_most(max(off), ROUNDED)
    return results
