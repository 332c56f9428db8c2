"""Whether a start with sites gives the same bits as a start of stock vLLM, over many requests.

Two starts of the same engine need not agree in every bit. vLLM and its libraries choose some
kernels while they start, and kernels round differently. So one start of each says little: what
differs between them may come from the starts alone. Here starts take turns until one with sites
equals one of stock in every request. Sites that changed anything would never let that happen.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from cases import same
from chances import upper_bound
from offline import OfflineEngine, Outcome
from verdicts import Lines, Verdict, equal, report

REQUESTS = 1000
MOST = 4
"""Starts of each kind."""


def check_starts(start: Callable[[bool], OfflineEngine], batch: list[list[int]]) -> Iterator[Lines]:
    """Starts stock vLLM and ours by turns: every line so far, again and again.

    Args:
        start: starts ours if it is given True, else stock vLLM.
        batch: prompts.
    """
    runs: dict[str, list[Outcome]] = {}
    for turn in range(1, MOST + 1):
        for kind in ("stock", "ours"):
            engine = start(kind == "ours")
            runs[f"{kind} {turn}"] = engine.run(batch, max_tokens=24, logprobs=3)
            engine.close()
        lines, met = compare_starts(runs)
        yield lines
        if met:
            return


def compare_starts(runs: dict[str, Sequence[Outcome]]) -> tuple[Lines, bool]:
    """How many requests differ between each two starts, and whether the kinds met.

    Args:
        runs: the outcomes of each start, by its kind, a space, and its number.
    """
    results: dict[str, Verdict] = {}
    least = None
    for one, other in combinations(runs, 2):
        pairs = [*zip(runs[one], runs[other], strict=True)]
        differ = [pair for pair in pairs if not same(*pair)]
        results[f"{one} and {other}: requests that differ, of {len(pairs)}"] = report(len(differ))
        if differ:
            far = max(first_difference(a, b) for a, b in differ)
            results[f"{one} and {other}: largest difference of a log-probability"] = report(far)
        if one.split()[0] != other.split()[0]:
            least = len(differ) if least is None else min(least, len(differ))
    results["ours and stock, the two starts that agree best: requests that differ"] = equal(
        least, 0
    )
    if least is not None:
        sure = round(upper_bound(least, len(next(iter(runs.values())))), 6)
        results["the same: 95 % sure that a smaller share differs than"] = report(sure)
    return results, least == 0


def first_difference(one: Outcome, other: Outcome) -> float:
    """The largest difference of a log-probability, of equal tokens, up to the first unequal one."""
    worst = 0.0
    steps = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
    for token, twin, said, told in steps:
        common = said.keys() & told.keys()
        worst = max([worst, *(abs(said[name] - told[name]) for name in common)])
        if token != twin:
            break
    return worst
