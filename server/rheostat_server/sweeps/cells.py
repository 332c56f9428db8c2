"""One cell of a sweep in one prompt: a request with rows replaced, which is asked for answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rheostat_engine import Act, Kind, Plan, Site
from rheostat_server.admission.admit import AdmittedRequest
from rheostat_server.engine.backend import Delta, Ending
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.errors import Defect, Draining
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import ResponseItem
from rheostat_server.selectors.spans import runs
from rheostat_server.sweeps.answers import Question, Reading
from rheostat_server.sweeps.sources import SourceRows
from rheostat_server.vectors.store import Vector


class Blend(NamedTuple):
    """How rows are put in; see `Replace`."""

    alpha: float
    mask: Vector | None


class Replaced(NamedTuple):
    """Rows that are replaced at a site."""

    site: Site
    positions: tuple[int, ...]
    """Positions of the prompt that is run, ascending."""
    source: SourceRows
    """The row for each of them."""


def replacing(replaced: Sequence[Replaced], blend: Blend) -> tuple[Act, ...]:
    """The acts that replace rows."""
    acts = []
    for site, positions, source in replaced:
        masks = () if blend.mask is None else (blend.mask.digest,)
        by_row: dict[int, list[int]] = {}
        for position, row in zip(positions, source.rows, strict=True):
            by_row.setdefault(row, []).append(position)
        for row, at in by_row.items():
            act = Act(
                kind=Kind.REPLACE,
                vectors=(source.vector.digest, *masks),
                rows=((site.index, (row, *(0 for _ in masks))),),
                spans=runs(np.array(at)),
                scale=blend.alpha,
            )
            acts.append(act)
    return tuple(act for act in acts if act.acts)


def with_acts(
    base: AdmittedRequest, acts: tuple[Act, ...], vectors: Sequence[Vector]
) -> AdmittedRequest:
    """A request that does what `base` does, and then some more acts.

    Nobody observes it, and it captures nothing. Its plan is packed, which may take long.

    Args:
        base: the request.
        acts: the acts, which follow those of `base`.
        vectors: their vectors.
    """
    plan = Plan("", (*base.unobserved.acts, *acts), ()).pack()
    needed = {vector.digest: vector for vector in (*base.vectors, *vectors)}
    return replace(
        base,
        plan=plan,
        unobserved=plan,
        vectors=tuple(needed.values()),
        captures=(),
        observer_captures=(),
    )


class Asked(NamedTuple):
    """An answered question."""

    reading: Reading
    computed: int
    """Prompt tokens that were computed, rather than read from the prefix cache."""


async def ask(
    admitted: AdmittedRequest, question: Question, request_id: str, manager: RequestManager
) -> Asked:
    """Asks a request for the probability of a token.

    The token is the only one that may be sampled. vLLM takes its log-probability and rank from the
    whole distribution, before the others are excluded. vLLM's `logprob_token_ids` would answer
    several questions at once, but not their ranks. And with its V1 runner, one such request takes
    the most likely tokens away from all other requests of the batch.

    Args:
        admitted: the request.
        question: the token, and the tokens that follow the prompt before it.
        request_id: an id that no other request has.
        manager: runs the request.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    prompt = admitted.prompt
    if question.preceding:
        tokens = (*prompt.token_ids, *question.preceding)
        prompt = PromptTokens(tokens, prompt.source, None, None)
    asked = replace(
        admitted,
        request_id=request_id,
        prompt=prompt,
        plan=replace(admitted.plan, request_id=request_id),
        sampling=SamplingSettings(
            max_tokens=1,
            temperature=0.0,
            logprobs=min(1, manager.info.logprobs),
            only_token=question.token_id,
            ignore_eos=True,
        ),
    )
    async with manager.run_request(asked) as active:
        (sequence,) = active.sequences
        sequence.held_back = True  # so that the report of the plan's installation wakes us
        delta: Delta | None = None
        while delta is None or not sequence.in_force:
            item = await active.next()
            if isinstance(item, ResponseItem) and isinstance(item.what, Delta):
                delta = item.what
                if delta.ending is Ending.ABORTED:
                    raise Draining("the server is ending; it did not run all cells")
        active.completed = True
    if len(delta.logprobs) != 1:
        raise Defect("the engine did not give the log-probability of an answer")
    (at,) = delta.logprobs
    top = at.alternatives[0].token_id if at.alternatives else None
    if at.token.rank == 1:
        top = at.token.token_id
    reading = Reading(at.token.logprob, at.token.rank, top)
    return Asked(reading, len(prompt.token_ids) - delta.cached_tokens)
