"""An engine that is driven step by step, so that something can happen while requests run.

In this process a step is one forward pass. Where vLLM runs in a process of its own, it goes on by
itself: a step then waits until something has come of one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rheostat_engine import EXTRA_ARG, Act, GainsUpdate, Plan
from rheostat_engine.plan.gains import updates_to

if TYPE_CHECKING:
    from .offline import OfflineEngine, Outcome


class Stepped:
    """Requests that are added, changed and run to their end."""

    def __init__(self, engine: OfflineEngine) -> None:
        """Of an engine in which nothing runs."""
        self._engine = engine
        self._inner = engine.llm.llm_engine
        self._outputs: dict[str, Any] = {}
        self._changed: set[str] = set()
        self.plans: dict[str, Plan | None] = {}
        """What each request began with."""
        self.prompts: dict[str, list[int]] = {}
        """Token ids of each request."""

    def held(self) -> AbstractContextManager[None]:
        """No step runs in the meantime: what begins in it is batched together."""
        return self._engine.held()

    def begin(
        self, name: str, prompt: list[int], plan: Plan | None, max_tokens: int, **sampling: Any
    ) -> None:
        """Adds a request."""
        from vllm import SamplingParams

        extra = None if plan is None else {EXTRA_ARG: replace(plan, request_id=name).to_wire()}
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
            extra_args=extra,
            **sampling,
        )
        self._inner.add_request(name, {"prompt_token_ids": prompt}, params)
        self.plans[name], self.prompts[name] = plan, prompt

    def update_captures(self, number: int, wanted: dict[str, Plan]) -> None:
        """Changes what is captured of requests."""
        changes = {name: (number, plan.to_wire()) for name, plan in wanted.items()}
        self._engine.llm.collective_rpc("rheostat_update_captures", args=(changes,))
        self._changed |= set(wanted)

    def give_gains(self, name: str, acts: tuple[Act, ...]) -> None:
        """Gives the present acts of a request, `acts`, the gains that `acts` name."""
        update = Plan(name, acts, gained=True).to_wire(), [name], 0
        answers = self._engine.llm.collective_rpc("rheostat_update_steering", args=([update],))
        assert not any(error for [[(_, error)]] in answers), answers

    def set_gains(self, change: int, name: str, gains: dict[int, float]) -> None:
        """Changes gains of a request from its next step on; only where vLLM runs in this process.

        They must have been given before.
        """
        wire = updates_to([GainsUpdate(name, change, 0, gains)])
        self._inner.engine_core.engine_core.rheostat_set_gains(wire)

    def step(self, count: int = 1) -> None:
        """Goes on by some steps."""
        for _ in range(count):
            for output in self._inner.step():
                self._outputs[output.request_id] = output

    def finish(self) -> dict[str, Outcome]:
        """Runs everything to its end."""
        while self._inner.has_unfinished_requests():
            self.step()
        self._engine.settle()
        told = {*self._changed, *(name for name, plan in self.plans.items() if plan is not None)}
        outputs, self._outputs = self._outputs, {}
        return {
            name: self._engine.outcome(output, name if name in told else None)
            for name, output in outputs.items()
        }
