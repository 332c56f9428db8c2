"""What vLLM says of a sample, in the server's words."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from rheostat._proto.v1 import generation_pb2
from rheostat_server.errors import Defect
from rheostat_server.host import Delta, Ending, Job

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput

_LOGPROB_ENTRIES = 2000
"""Log-probabilities of a prompt beyond which their messages are made on a thread."""


async def delta_of(job: Job, output: "RequestOutput") -> Delta:
    """What an output of vLLM's says of a sample."""
    entries = len(output.prompt_logprobs or ()) * ((job.sampling.prompt_logprobs or 0) + 1)
    if entries > _LOGPROB_ENTRIES:
        return await asyncio.to_thread(_delta, job, output)
    return _delta(job, output)


def _delta(job: Job, output: "RequestOutput") -> Delta:
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    readings: Sequence[generation_pb2.TokenLogprobs] = ()
    if completion.logprobs and job.sampling.logprobs is not None:
        readings = [
            _reading(token, cast("Mapping[int, Logprob]", position), job.sampling.logprobs)
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
        prompt_logprobs=_prompt_readings(job, output),
        cached_tokens=output.num_cached_tokens or 0,
        ending=ending,
        stop=completion.stop_reason,
    )


def _prompt_readings(
    job: Job, output: "RequestOutput"
) -> list[generation_pb2.TokenLogprobs] | None:
    wanted = job.sampling.prompt_logprobs
    if wanted is None or not output.prompt_logprobs:
        return None
    return [
        _reading(token, cast("Mapping[int, Logprob]", position), wanted)
        for token, position in zip(job.prompt, output.prompt_logprobs, strict=True)
        if position is not None
    ]


def _reading(
    token: int, position: "Mapping[int, Logprob]", alternatives: int
) -> generation_pb2.TokenLogprobs:
    def entry(token_id: int, logprob: "Logprob") -> generation_pb2.TokenLogprob:
        return generation_pb2.TokenLogprob(
            token_id=token_id,
            logprob=logprob.logprob,
            rank=logprob.rank or 0,
            text=logprob.decoded_token or "",
        )

    best = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return generation_pb2.TokenLogprobs(
        token=entry(token, position[token]),
        alternatives=[entry(*item) for item in best if (item[1].rank or 0) <= alternatives],
    )
