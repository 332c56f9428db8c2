"""Converts vLLM's outputs to deltas."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from rheostat_engine import Output
from rheostat_server.engine.backend import Delta, Ending, Job
from rheostat_server.errors import Defect
from rheostat_wire.v1 import generation_pb2

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.tokenizers import TokenizerLike

_LOGPROB_ENTRIES = 2000
"""If a prompt has more log-probabilities, their messages are made on a thread."""

_TURN_ENTRIES = 512
"""Log-probabilities of tokens whose messages are made in one iteration of the event loop, in about
1 ms. Without turns, those of all samples of a step would be made in one iteration."""


TextOf = Callable[[int], str]
"""Gives the text of a single token."""


def token_texts(tokenizer: "TokenizerLike | None") -> TextOf:
    """A function that gives the texts of single tokens, invalid UTF-8 replaced.

    Each token is decoded once. Without a tokenizer every text is empty. The engine sends
    log-probabilities without texts, because decoding takes longer than all other work on them.
    """

    @cache
    def text_of(token_id: int) -> str:
        if tokenizer is None:
            return ""
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

        (text,) = convert_ids_list_to_tokens(tokenizer, [token_id])
        return text

    return text_of


class OutputTurns:
    """Spreads outputs with many log-probabilities over iterations of the event loop, in order.

    Each iteration reads at least a quarter of the log-probabilities that wait. So few wait, however
    many samples there are.
    """

    def __init__(self) -> None:
        """No output waits."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Outputs that wait: their entries, and a function that reads them."""
        self._entries = 0
        """Entries of all outputs that wait."""
        self._left = _TURN_ENTRIES
        """Entries that may still be read in this iteration."""
        self._scheduled = False

    def take(self, entries: int) -> bool:
        """Whether so many entries may be read now. The first output of an iteration always may."""
        if not entries:
            return True
        if self._left <= 0:
            return False
        self._left -= entries
        self._schedule()
        return True

    def wait(self, entries: int, read: Callable[[], None]) -> None:
        """Calls a function in a later iteration. It must not raise."""
        self._waiting.append((entries, read))
        self._entries += entries
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Begins an iteration."""
        self._scheduled = False
        self._left = max(_TURN_ENTRIES, self._entries // 4)
        while self._waiting and self._left > 0:
            entries, read = self._waiting.popleft()
            self._entries -= entries
            self._left -= entries
            read()
        if self._waiting:
            self._schedule()


class DeltaReader:
    """Turns the outputs of a sample into deltas, in order.

    Long log-probabilities of a prompt are read on a thread. Log-probabilities of tokens are read in
    turns with those of other samples. Outputs that come meanwhile wait.
    """

    def __init__(
        self,
        job: Job,
        text_of: TextOf,
        turns: OutputTurns,
        receive: Callable[[Delta], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Makes the reader of a sample that has no outputs.

        Args:
            job: the sample.
            text_of: gives the texts of tokens.
            turns: of all samples.
            receive: is called with each delta.
            fail: is called if an output cannot be read later.
        """
        self._job = job
        self._text_of = text_of
        self._turns = turns
        self._receive = receive
        self._fail = fail
        self._waiting: deque[Output] | None = None
        """Outputs that wait for `_reading`; None if there is no such task."""
        self._reading: asyncio.Task[None] | None = None
        self._later = 0
        """Outputs that wait for their turn."""

    def put(self, output: Output) -> None:
        """Reads an output.

        Raises:
            Defect: the engine gave the sample up.
        """
        if self._waiting is not None:
            self._waiting.append(output)
        elif output.prompt_logprobs and self._is_long(output):
            self._waiting = deque([output])
            self._reading = asyncio.create_task(self._read_waiting())
        elif self._later or not self._turns.take(self._entries(output)):
            self._later += 1
            self._turns.wait(self._entries(output), partial(self._read_later, output))
        else:
            self._receive(_delta(self._job, output, self._text_of))

    def _is_long(self, output: Output) -> bool:
        alternatives = self._job.sampling.prompt_logprobs or 0
        return len(output.prompt_logprobs or ()) * (alternatives + 1) > _LOGPROB_ENTRIES

    def _entries(self, output: Output) -> int:
        """Log-probabilities of the output's tokens."""
        alternatives = self._job.sampling.logprobs
        if alternatives is None:
            return 0
        return len(output.token_ids) * (alternatives + 1)

    def _read_later(self, output: Output) -> None:
        self._later -= 1
        try:
            self._receive(_delta(self._job, output, self._text_of))
        except Exception as error:  # nobody calls this, so any error must fail the sample
            self._fail(error)

    async def _read_waiting(self) -> None:
        assert self._waiting is not None
        try:
            while self._waiting:
                output = self._waiting.popleft()
                read = partial(_delta, self._job, output, self._text_of)
                self._receive(await asyncio.to_thread(read) if self._is_long(output) else read())
        except Exception as error:  # the task ends here, so any error must fail the sample
            self._fail(error)
        finally:
            self._waiting = None


def _delta(job: Job, output: Output, text_of: TextOf) -> Delta:
    token_ids = tuple(output.token_ids)
    readings: Sequence[generation_pb2.TokenLogprobs] = ()
    if output.logprobs and job.sampling.logprobs is not None:
        readings = [
            _reading(token, cast("Mapping[int, Logprob]", position), job.sampling.logprobs, text_of)
            for token, position in zip(token_ids, output.logprobs, strict=True)
        ]
    ending = None
    if output.finish_reason is not None:
        try:
            ending = Ending(output.finish_reason)
        except ValueError as error:
            raise Defect("the engine gave the request up") from error
    return Delta(
        token_ids=token_ids,
        text=output.text,
        logprobs=readings,
        prompt_logprobs=_prompt_readings(job, output, text_of) if output.prompt_logprobs else None,
        cached_tokens=output.cached_tokens,
        ending=ending,
        stop=output.stop_reason,
    )


def _prompt_readings(
    job: Job, output: Output, text_of: TextOf
) -> list[generation_pb2.TokenLogprobs] | None:
    wanted = job.sampling.prompt_logprobs
    if wanted is None or not output.prompt_logprobs:
        return None
    return [
        _reading(token, cast("Mapping[int, Logprob]", position), wanted, text_of)
        for token, position in zip(job.prompt, output.prompt_logprobs, strict=True)
        if position  # nothing precedes the first token
    ]


def _reading(
    token: int, position: "Mapping[int, Logprob]", alternatives: int, text_of: TextOf
) -> generation_pb2.TokenLogprobs:
    """The message of a token. It is made in place: messages that are copied take twice as long."""
    reading = generation_pb2.TokenLogprobs()
    own, add = position[token], reading.alternatives.add
    chosen = reading.token
    chosen.token_id = token
    chosen.logprob = own.logprob
    chosen.rank = own.rank or 0
    chosen.text = text_of(token)
    for token_id, logprob in sorted(position.items(), key=lambda item: item[1].rank or 0):
        rank = logprob.rank or 0
        if rank <= alternatives:
            add(token_id=token_id, logprob=logprob.logprob, rank=rank, text=text_of(token_id))
    return reading
