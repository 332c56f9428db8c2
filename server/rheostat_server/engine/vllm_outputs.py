"""Converts vLLM's outputs to deltas."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from rheostat_server.engine.backend import Delta, Ending, Job
from rheostat_server.errors import Defect
from rheostat_wire.v1 import generation_pb2

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput
    from vllm.tokenizers import TokenizerLike

_LOGPROB_ENTRIES = 2000
"""If a prompt has more log-probabilities, their messages are made on a thread."""


TextOf = Callable[[int], str]
"""Gives the text of a single token."""


class TokenTexts:
    """The texts of single tokens, each decoded once.

    The engine sends log-probabilities without texts, because decoding takes longer than all other
    work on them.
    """

    def __init__(self, tokenizer: "TokenizerLike | None") -> None:
        """Nothing is decoded yet. Without a tokenizer every text is empty."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """The text of a token, invalid UTF-8 replaced."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

        (text,) = convert_ids_list_to_tokens(self._tokenizer, [token_id])
        return text


class DeltaReader:
    """Turns the outputs of a sample into deltas, in order.

    Long log-probabilities of a prompt are read on a thread. Outputs that come meanwhile wait.
    """

    def __init__(
        self,
        job: Job,
        text_of: TextOf,
        receive: Callable[[Delta], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Makes the reader of a sample that has no outputs.

        Args:
            job: the sample.
            text_of: gives the texts of tokens.
            receive: is called with each delta.
            fail: is called if an output cannot be read on a thread.
        """
        self._job = job
        self._text_of = text_of
        self._receive = receive
        self._fail = fail
        self._waiting: deque[RequestOutput] | None = None
        """Outputs that wait for `_reading`; None if there is no such task."""
        self._reading: asyncio.Task[None] | None = None

    def put(self, output: "RequestOutput") -> None:
        """Reads an output.

        Raises:
            Defect: the engine gave the sample up.
        """
        if self._waiting is not None:
            self._waiting.append(output)
        elif output.prompt_logprobs and self._is_long(output):
            self._waiting = deque([output])
            self._reading = asyncio.create_task(self._read_waiting())
        else:
            self._receive(_delta(self._job, output, self._text_of))

    def _is_long(self, output: "RequestOutput") -> bool:
        alternatives = self._job.sampling.prompt_logprobs or 0
        return len(output.prompt_logprobs or ()) * (alternatives + 1) > _LOGPROB_ENTRIES

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


def _delta(job: Job, output: "RequestOutput", text_of: TextOf) -> Delta:
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    readings: Sequence[generation_pb2.TokenLogprobs] = ()
    if completion.logprobs and job.sampling.logprobs is not None:
        readings = [
            _reading(token, cast("Mapping[int, Logprob]", position), job.sampling.logprobs, text_of)
            for token, position in zip(token_ids, completion.logprobs, strict=True)
        ]
    ending = None
    if completion.finish_reason is not None:
        try:
            ending = Ending(completion.finish_reason)
        except ValueError as error:
            raise Defect("the engine gave the request up") from error
    return Delta(
        token_ids=token_ids,
        text=completion.text,
        logprobs=readings,
        prompt_logprobs=_prompt_readings(job, output, text_of) if output.prompt_logprobs else None,
        cached_tokens=output.num_cached_tokens or 0,
        ending=ending,
        stop=completion.stop_reason,
    )


def _prompt_readings(
    job: Job, output: "RequestOutput", text_of: TextOf
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
    def entry(token_id: int, logprob: "Logprob") -> generation_pb2.TokenLogprob:
        return generation_pb2.TokenLogprob(
            token_id=token_id,
            logprob=logprob.logprob,
            rank=logprob.rank or 0,
            text=text_of(token_id),
        )

    best = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return generation_pb2.TokenLogprobs(
        token=entry(token, position[token]),
        alternatives=[entry(*item) for item in best if (item[1].rank or 0) <= alternatives],
    )
