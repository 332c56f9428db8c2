"""Who may still enter: a ledger of bank rows, slots and capture rows, kept at admission.

Invariant: as long as every plan passes through `admit` before it reaches the engine and is
released only after the worker has let go of it, the worker's bank and ring never overflow. Rows and
slots are counted by content, exactly as the worker shares them.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from rheostat_engine.plan import Plan, RowKey

Combination = tuple[tuple[int, RowKey], ...]
_Key = TypeVar("_Key")


class Shortage(NamedTuple):
    """Why a plan doesn't fit."""

    resource: str
    """"bank rows", "slots" or "capture rows"."""
    needed: int
    """How many more the plan needs."""
    free: int
    """How many are free now."""
    ever: bool
    """Whether it fits once others have finished; False: it never can."""


@dataclass(frozen=True, slots=True)
class _Holding:
    rows: frozenset[RowKey]
    combinations: frozenset[Combination]
    capture_rows: int


class CapacityLedger:
    """Counts what the admitted plans hold."""

    def __init__(self, *, bank_rows: int, slots: int, capture_rows: int) -> None:
        """All limits are those that the worker reports (`ModelSites`)."""
        self._limits = {"bank rows": bank_rows, "slots": slots, "capture rows": capture_rows}
        self._rows: Counter[RowKey] = Counter()
        self._combinations: Counter[Combination] = Counter()
        self._capture_rows = 0
        self._held: dict[str, _Holding] = {}

    @property
    def bank_rows_used(self) -> int:
        """Distinct rows that admitted plans hold."""
        return len(self._rows)

    @property
    def slots_used(self) -> int:
        """Distinct combinations that admitted plans hold."""
        return len(self._combinations)

    @property
    def capture_rows_used(self) -> int:
        """Ring rows that one step may need for the admitted plans."""
        return self._capture_rows

    @property
    def requests(self) -> int:
        """Plans admitted and not released."""
        return len(self._held)

    def admit(self, plan: Plan, *, prompt_len: int, max_step_tokens: int) -> Shortage | None:
        """Reserves what `plan` needs, or says what is missing and reserves nothing.

        Args:
            plan: the request's plan; its id must not be held.
            prompt_len: tokens of the prompt.
            max_step_tokens: the most tokens that one step computes.
        """
        if plan.request_id in self._held:
            raise ValueError(f"request {plan.request_id!r} is already admitted")
        rows, combinations = plan.row_keys(), plan.combinations()
        capture = step_capture_rows(plan, prompt_len=prompt_len, max_step_tokens=max_step_tokens)
        demands = (
            ("bank rows", len(rows), len(rows - self._rows.keys()), len(self._rows)),
            (
                "slots",
                len(combinations),
                len(combinations - self._combinations.keys()),
                len(self._combinations),
            ),
            ("capture rows", capture, capture, self._capture_rows),
        )
        shortages = [
            Shortage(
                resource, needed, self._limits[resource] - used, alone <= self._limits[resource]
            )
            for resource, alone, needed, used in demands
            if used + needed > self._limits[resource]
        ]
        if shortages:
            return min(shortages, key=lambda shortage: shortage.ever)
        self._rows.update(rows)
        self._combinations.update(combinations)
        self._capture_rows += capture
        self._held[plan.request_id] = _Holding(rows, combinations, capture)
        return None

    def release(self, request_id: str) -> None:
        """Gives back what a request holds; nothing if it holds nothing."""
        holding = self._held.pop(request_id, None)
        if holding is None:
            return
        _give_back(self._rows, holding.rows)
        _give_back(self._combinations, holding.combinations)
        self._capture_rows -= holding.capture_rows


def step_capture_rows(plan: Plan, *, prompt_len: int, max_step_tokens: int) -> int:
    """The most ring rows that one step can need for a plan: its densest chunk times its sites.

    A chunk of the prompt is at most `max_step_tokens` long. Generated tokens come one in a step; a
    preempted request that computes them again has had their rows delivered already.
    """
    total = 0
    for capture in plan.captures:
        in_prompt = sum(max(0, min(end, prompt_len) - start) for start, end in capture.spans)
        generated = any(end > prompt_len for _, end in capture.spans)
        total += len(capture.sites) * max(min(in_prompt, max_step_tokens), int(generated))
    return total


def _give_back(counter: Counter[_Key], keys: frozenset[_Key]) -> None:
    for key in keys:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
