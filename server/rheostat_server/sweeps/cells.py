"""Replaces rows in a request, and runs it for the probabilities of a sweep's questions.

`cell_requests` chooses which rows, and `measurements` makes metrics of the answers. Some grades
need rows of the prompt. The first question of the prompt captures them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rheostat_engine import Act, Kind, Plan, Site, Window
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.planning import problem_of
from rheostat_server.delivery.items import Chunk, EncodedChunk, Loss
from rheostat_server.delivery.row_messages import CapturedRows, captured_rows
from rheostat_server.engine.backend import Delta, Ending
from rheostat_server.engine.sampling import SamplingSettings
from rheostat_server.errors import Defect, Draining, InvalidValue, RowsLost
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import ResponseItem, Sign
from rheostat_server.requests.sequence import EngineSequence
from rheostat_server.selectors.spans import runs
from rheostat_server.sweeps.answers import Question, Reading
from rheostat_server.sweeps.grades import RowReader
from rheostat_server.sweeps.sources import SourceRows
from rheostat_server.tasks.offload import offload
from rheostat_server.vectors.store import Vector

_NOTHING = Plan("", (), ()).pack()
"""A plan without captures."""

_ACT_BYTES = 1024
"""Bytes that `offload` counts for an act or an interval of a plan."""


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
                spans=((at[0], at[0] + 1),) if len(at) == 1 else runs(np.array(at)),
                scale=blend.alpha,
            )
            acts.append(act)
    return tuple(act for act in acts if act.acts)


def estimate_packing(base: AdmittedRequest, rows: int) -> int:
    """Bytes that `offload` counts for `with_acts`, if the acts replace so many rows."""
    table = base.unobserved.packed_acts.table
    intervals = 0 if table is None else len(table.intervals.starts)
    return _ACT_BYTES * (len(base.unobserved.acts) + intervals + rows)


def with_acts(
    base: AdmittedRequest,
    acts: tuple[Act, ...],
    vectors: Sequence[Vector],
    window: Window | None = None,
) -> AdmittedRequest:
    """Makes a request with the acts of `base`, followed by more acts.

    It has the captures of `base`, without those of observers. The engine does not measure its acts,
    because nobody reads these measurements. Its plan is packed, which may take long.

    Args:
        base: the request.
        acts: the acts, which follow those of `base`.
        vectors: their vectors.
        window: limits some of these acts to its positions. None: no act is limited.

    Raises:
        InvalidValue: no engine can run all these acts together.
    """
    own = base.unobserved
    try:
        plan = Plan("", (*own.acts, *acts), own.captures, measured=False, window=window).pack()
    except ValueError as error:
        raise InvalidValue(
            f"the cell's rows together with the steering: {problem_of(error)}", field="steering"
        ) from error
    needed = {vector.digest: vector for vector in (*base.vectors, *vectors)}
    return replace(
        base,
        plan=plan,
        unobserved=plan,
        vectors=tuple(needed.values()),
        observer_captures=(),
    )


class Asked(NamedTuple):
    """An answered question."""

    reading: Reading
    computed: int
    """Prompt tokens that were computed, rather than read from the prefix cache."""


async def ask(
    admitted: AdmittedRequest,
    question: Question,
    request_id: str,
    manager: RequestManager,
    windows: tuple[Window, ...] = (),
    readers: Sequence[Sequence[RowReader]] = (),
) -> list[Asked]:
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
        windows: windows of the request's plan, for a sample each. Empty: one sample uses the plan
            unchanged.
        readers: for each sample, a reader of rows for each of the request's captures. Empty: the
            request captures nothing, and observers attach to it like to a running request.

    Returns:
        The answer of each sample, in the order of `windows`.

    Raises:
        RheostatError: the request cannot run, or has failed.
    """
    prompt, plan = admitted.prompt, admitted.plan
    if question.preceding:
        tokens = (*prompt.token_ids, *question.preceding)
        prompt = PromptTokens(tokens, prompt.source, None, None)
    if not readers and plan.captures:
        plan = plan.with_captures_of(_NOTHING)
    samples = max(1, len(windows))
    sampling = _sampling(question.token_id, min(1, manager.info.logprobs), samples)
    asked = admitted.with_question(
        request_id, prompt, sampling, plan, captures=bool(readers), windows=windows
    )
    deltas: dict[EngineSequence, Delta] = {}  # each sample has one
    async with manager.run_request(asked) as active:
        waiting = [*active.sequences]
        while waiting:
            sequence = waiting[-1]
            captured = not readers or sequence.released.is_set()  # then all its rows are captured
            if sequence in deltas and sequence.in_force and captured:
                waiting.pop()
                continue
            item = await active.next()
            if item is Sign.ROWS:
                await _read_rows(active, readers)
            elif isinstance(item, ResponseItem) and isinstance(item.what, Delta):
                deltas[item.sequence] = item.what
                # The report that the plan is installed may come after the delta. It usually comes
                # before. `held_back` makes a later report end `active.next`.
                item.sequence.held_back = True
                if item.what.ending is Ending.ABORTED:
                    raise Draining("the server is ending; it did not run all cells")
        if readers:
            active.finish()  # the rows that remain come with their end
            await _read_rows(active, readers)
            while not active.response_rows.ended:
                await active.next()
                await _read_rows(active, readers)
        active.completed = True
    prompt_len = len(prompt.token_ids)
    return [_answer(deltas[sequence], prompt_len) for sequence in active.sequences]


def _answer(delta: Delta, prompt_len: int) -> Asked:
    """Reads the answer from the delta of a sample. Its prompt has `prompt_len` tokens."""
    if len(delta.logprobs) != 1:
        raise Defect("the engine did not give the log-probability of an answer")
    (at,) = delta.logprobs
    top = at.alternatives[0].token_id if at.alternatives else None
    if at.token.rank == 1:
        top = at.token.token_id
    reading = Reading(at.token.logprob, at.token.rank, top)
    return Asked(reading, prompt_len - delta.cached_tokens)


@lru_cache(64)
def _sampling(token_id: int | None, logprobs: int, samples: int) -> SamplingSettings:
    """The sampling settings of a question. Requests with as many samples share them."""
    return SamplingSettings(
        samples=samples,
        max_tokens=1,
        temperature=0.0,
        logprobs=logprobs,
        only_token=token_id,
        ignore_eos=True,
        text=False,
    )


async def _read_rows(active: ActiveRequest, readers: Sequence[Sequence[RowReader]]) -> None:
    """Passes the captured rows that have arrived to their readers.

    Raises:
        RowsLost: some are lost.
    """
    while (item := active.response_rows.take()) is not None:
        if isinstance(item, Loss):
            raise RowsLost.no_room(item.rows)
        assert isinstance(item, Chunk | EncodedChunk)
        captured = await captured_rows(item)
        await offload(captured.size, _hand_over, captured, readers)


def _hand_over(captured: CapturedRows, readers: Sequence[Sequence[RowReader]]) -> None:
    """Passes rows to the reader of their sample and capture."""
    part = captured.to_message()
    _, count, width = part.tensor.shape
    rows = np.frombuffer(part.tensor.inline, dtype="<f4").reshape(count, width)
    readers[part.sample][part.capture_index].add(rows)
