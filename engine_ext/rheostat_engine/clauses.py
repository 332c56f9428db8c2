"""The clauses of acts: the positions that each takes, those under a condition apart."""

from collections.abc import Sequence
from typing import NamedTuple

from rheostat_engine.plan import Act, Spans, TokenSet


class Owner(NamedTuple):
    """Whose a clause is, and under which tokens it holds."""

    act: int
    """Index in the plan."""
    tokens: int | None
    """The set of token ids that it depends on, by number."""
    among: bool
    """Whether the selected tokens are those with such an id."""


class Clauses(NamedTuple):
    """Every act's positions, those that it takes under a condition apart."""

    owners: list[Owner]
    """One per clause."""
    spans: list[Spans]
    """One per clause."""
    sets: tuple[TokenSet, ...]
    """The different sets of token ids, in order. Their numbers stand for them."""


def clauses_of(acts: Sequence[Act]) -> Clauses:
    """The clauses of all acts, in their order."""
    sets = tuple(sorted({one.tokens for act in acts for one in act.conditions}))
    number = {tokens: place for place, tokens in enumerate(sets)}
    owners: list[Owner] = []
    spans: list[Spans] = []
    for index, act in enumerate(acts):
        owners.append(Owner(index, None, among=True))
        spans.append(act.spans)
        for condition in act.conditions:
            owners.append(Owner(index, number[condition.tokens], condition.among))
            spans.append(condition.spans)
    return Clauses(owners, spans, sets)
