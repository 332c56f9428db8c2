"""Adapters for the process with the `AsyncLLM`, importable without vLLM."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rheostat_engine.output import Pace, Receive
from rheostat_engine.plan.gains import GainsUpdate

if TYPE_CHECKING:
    from rheostat_engine.adapters.output_handler import OutputReader
    from rheostat_engine.adapters.outputs import Client as OutputClient
    from rheostat_engine.adapters.outputs import Collector
    from rheostat_engine.adapters.scheduler_stats import Engine, Record
    from rheostat_engine.adapters.templates import Lora, Params, RequestTemplate


def prepare_async_llm() -> None:
    """Stops vLLM from decoding log-probabilities and whole prompts on the event loop.

    Call it before creating an `AsyncLLM`. See `adapters.logprobs` and `adapters.detokenizer`.
    """
    # The other functions' adapters are imported here too. vLLM keeps the errors of optional
    # imports, and so every frame that was on the stack. If such a frame referred to an `AsyncLLM`,
    # it would be freed only at interpreter shutdown, and fail there.
    from rheostat_engine.adapters import (  # noqa: F401
        core_messages,
        end_token,
        gains,
        holds,
        output_handler,
        outputs,
        request_copies,
        scheduler_stats,
        templates,
    )
    from rheostat_engine.adapters.detokenizer import decode_last_tokens
    from rheostat_engine.adapters.logprobs import leave_logprobs_undecoded

    leave_logprobs_undecoded()
    decode_last_tokens()


async def stop_async_llm(llm: "OutputReader") -> None:
    """Lets `llm.shutdown()` end without a traceback; see `adapters.output_handler`."""
    from rheostat_engine.adapters.output_handler import stop_output_handler

    await stop_output_handler(llm)


def adapt_async_llm(llm: "Engine", record: "Record") -> None:
    """Makes a new engine do less on the event loop, for each step and each request.

    See `adapters.scheduler_stats`, `adapters.end_token` and `adapters.core_messages`.

    Args:
        llm: the engine.
        record: called with the scheduler's statistics of each step.

    Raises:
        RuntimeError: the engine's output handler is running already.
    """
    from rheostat_engine.adapters.core_messages import add_requests_fast
    from rheostat_engine.adapters.end_token import keep_end_token
    from rheostat_engine.adapters.scheduler_stats import watch_scheduler

    watch_scheduler(llm, record)
    keep_end_token(llm)
    add_requests_fast(llm)


def request_template(params: "Params", lora: "Lora | None", priority: int) -> "RequestTemplate":
    """A template that adds requests with equal parameters; see `adapters.templates`."""
    from rheostat_engine.adapters.templates import RequestTemplate

    return RequestTemplate(params, lora, priority)


def receive_outputs(
    llm: "OutputClient",
    collector: "Collector",
    receive: Receive,
    fail: Callable[[Exception], None],
    pace: Pace | None = None,
) -> None:
    """Calls a function with each output of a request; see `adapters.outputs`."""
    from rheostat_engine.adapters import outputs

    outputs.receive_outputs(llm, collector, receive, fail, pace)


async def send_gains(llm: "Engine", updates: Iterable[GainsUpdate]) -> None:
    """Changes gains of running requests, each from its next step on; see `adapters.gains`."""
    from rheostat_engine.adapters import gains

    await gains.send_gains(llm, updates)


async def send_holds(llm: "Engine", ids: Iterable[str], *, held: bool) -> None:
    """Holds or releases running requests, from the next step on; see `adapters.holds`."""
    from rheostat_engine.adapters import holds

    await holds.send_holds(llm, ids, held=held)
