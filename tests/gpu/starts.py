"""Whether a start with sites gives the same bits as a start of stock vLLM, over many requests.

Eager, both run the same kernels, so every bit of every request has to be equal.

Compiled, they need not be equal, and neither need two starts of stock. Inductor makes the kernels
of our graph and of stock's separately, and each kernel adds in an order of its own. So some numbers
round differently. Two starts of each kind say how many requests that reaches, and how far.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from cases import same
from chances import upper_bound
from offline import OfflineEngine, Outcome
from verdicts import Lines, Verdict, at_most, each, equal, report

REQUESTS = 1000
STARTS = 2
"""Compiled starts of each kind."""

_SHARE = 0.15
"""Largest allowed share of requests that differ between two compiled starts. The largest seen was
8.6 %, between stock and ours."""
_FAR = 0.25
"""Largest allowed difference of a log-probability. In a small model 0.033 was seen, a unit in the
last place of a logit in bfloat16. In a small mixture of experts it was 0.15, and 0.09 between two
starts of stock, because a rounding can choose another expert."""


def check_starts(
    start: Callable[[bool, bool], OfflineEngine], batch: list[list[int]]
) -> Iterator[Lines]:
    """Starts stock vLLM and ours by turns: every line so far, again and again.

    Args:
        start: starts ours if its first argument is true, else stock vLLM; eager if the second is.
        batch: prompts.
    """
    runs: dict[str, list[Outcome]] = {}
    for turn in range(STARTS + 1):
        for kind in ("stock", "ours"):
            engine = start(kind == "ours", not turn)
            name = f"{kind} {turn}" if turn else f"{kind} eager"
            runs[name] = engine.run(batch, max_tokens=24, logprobs=3)
            engine.close()
        yield compare_starts(runs)


def compare_starts(runs: Mapping[str, Sequence[Outcome]]) -> Lines:
    """How many requests differ between each two starts, and how far.

    Args:
        runs: the outcomes of each start, by its kind, a space, and "eager" or its number.
    """
    results: dict[str, Verdict] = {}
    most = farthest = 0.0
    compiled = {name: run for name, run in runs.items() if not name.endswith("eager")}
    for one, other in [("stock eager", "ours eager"), *combinations(compiled, 2)]:
        pairs = [*zip(runs[one], runs[other], strict=True)]
        differ = [pair for pair in pairs if not same(*pair)]
        line = f"{one} and {other}: requests that differ, of {len(pairs)}"
        if one not in compiled:
            results[line] = equal(len(differ), 0)
            continue
        results[line] = report(len(differ))
        far = max((first_difference(*pair) for pair in differ), default=0.0)
        results[f"{one} and {other}: largest difference of a log-probability"] = report(far)
        if one.split()[0] != other.split()[0]:
            most = max(most, upper_bound(len(differ), len(pairs)))
            farthest = max(farthest, far)
    if compiled:
        results["compiled, ours and stock: 95 % sure that a smaller share differs than"] = at_most(
            round(most, 6), _SHARE
        )
        results["the same: largest difference of a log-probability"] = at_most(farthest, _FAR)
    return results


def compare_with_stock(stock: Sequence[Outcome], idle: Sequence[Outcome]) -> Lines:
    """How an idle run of ours differs from the same batch in one compiled start of stock vLLM.

    A few requests may differ, for the reason above, but not far. The batch is small, so a quarter
    may: if 8.6 % of all requests differ, more than 6 of 24 do in 1 of 300 batches.
    """
    pairs = [*zip(stock, idle, strict=True)]
    verdict = each([same(*pair) for pair in pairs])
    few = sum(not same(*pair) for pair in pairs) <= len(pairs) // 4
    far = max((first_difference(*pair) for pair in pairs), default=0.0)
    return {
        "idle requests bit-identical to stock": Verdict(verdict.value, ">= 3/4 of them", few),
        "idle requests and stock: largest difference of a log-probability": at_most(far, _FAR),
    }


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
