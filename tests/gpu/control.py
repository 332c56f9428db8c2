"""How often two runs of the same requests differ, and whether that tells of us.

Two starts of stock vLLM need not agree in every bit, because some kernels are chosen by timing
them. One request that differs proves nothing then. So many requests are run by stock twice, by
another start of stock, and by ours, and the counts are compared.
"""

from collections.abc import Sequence

from cases import same
from chances import fisher, upper_bound
from offline import Outcome
from verdicts import Lines, Verdict, at_least

REQUESTS = 1000
SIGNIFICANT = 1e-3
"""Probability below which chance is no explanation."""


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


def check_control(
    first: Sequence[Outcome],
    again: Sequence[Outcome],
    other: Sequence[Outcome],
    ours: Sequence[Outcome],
) -> Lines:
    """Compares many requests in pairs of runs.

    Args:
        first: a start of stock vLLM.
        again: the same start, once more.
        other: another start of stock.
        ours: a start with sites, where nobody uses them.
    """
    of = len(first)
    results: dict[str, Verdict] = {}
    counts = {}
    for name, run in {"itself": again, "another start of stock": other, "ours": ours}.items():
        differ = [(a, b) for a, b in zip(first, run, strict=True) if not same(a, b)]
        counts[name] = len(differ)
        line = f"stock against {name}"
        results[f"{line}: requests that differ, of {of}"] = report(len(differ))
        results[f"{line}: 95 % sure that a smaller share differs than"] = report(
            round(upper_bound(len(differ), of), 6)
        )
        results[f"{line}: largest difference of a log-probability"] = report(
            max((first_difference(a, b) for a, b in differ), default=0.0)
        )
    chance = fisher(counts["ours"], counts["another start of stock"], of)
    results["probability that ours differ no more often than another start of stock"] = at_least(
        chance, SIGNIFICANT
    )
    return results


def report(value: object) -> Verdict:
    """Something that is stated, whatever it is."""
    return Verdict(value, "stated", True)
