"""The adapters of the process that has an `AsyncLLM`, for processes that may lack vLLM."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rheostat_engine.adapters.output_handler import OutputReader
    from rheostat_engine.adapters.outputs import Collector, Receive
    from rheostat_engine.adapters.scheduler_stats import Engine, Record


def prepare_front_end() -> None:
    """Keeps vLLM from decoding log-probabilities and whole prompts on the event loop.

    To be called before an `AsyncLLM` is made. See `adapters.logprobs` and `adapters.detokenizer`.
    """
    # The adapters of the other functions are imported here too. Errors of optional imports are kept
    # in vLLM, and with them all frames that were on the stack. If a variable of such a frame
    # referred to an `AsyncLLM`, it would only be freed while Python ends, and fail at that.
    from rheostat_engine.adapters import output_handler, outputs, scheduler_stats  # noqa: F401
    from rheostat_engine.adapters.detokenizer import decode_last_tokens
    from rheostat_engine.adapters.logprobs import leave_logprobs_undecoded

    leave_logprobs_undecoded()
    decode_last_tokens()


async def stop_front_end(llm: "OutputReader") -> None:
    """Keeps `llm.shutdown()` from looking like a crash; see `adapters.output_handler`."""
    from rheostat_engine.adapters.output_handler import stop_output_handler

    await stop_output_handler(llm)


def watch_scheduler(llm: "Engine", record: "Record") -> None:
    """Calls `record` with the scheduler's statistics of each step; see `adapters.scheduler_stats`.

    Raises:
        RuntimeError: the engine's output handler runs already.
    """
    from rheostat_engine.adapters import scheduler_stats

    scheduler_stats.watch_scheduler(llm, record)


def receive_outputs(
    collector: "Collector", receive: "Receive", fail: Callable[[Exception], None]
) -> None:
    """Calls a function with each output of a request; see `adapters.outputs`."""
    from rheostat_engine.adapters import outputs

    outputs.receive_outputs(collector, receive, fail)
