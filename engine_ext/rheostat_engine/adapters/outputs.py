"""Passes the outputs of a request to a function, without a task for each request.

Why
    `AsyncLLM.generate` needs a task for each request. vLLM's output handler puts an output into the
    request's collector, which wakes the task. A callback of the collector needs neither.
How
    `AsyncLLM.add_request` validates and sends the request, and returns its collector, whose `put`
    is replaced. Everything else is vLLM's: the output handler, the detokenizer, and `abort`.
What the callback must not do
    The output processor calls it while iterating over the running requests. So it must not abort a
    request before it returns.
"""

from collections.abc import Callable
from typing import cast

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

Collector = RequestOutputCollector

Receive = Callable[[RequestOutput], None]

_PUT = "put"


def receive_outputs(
    collector: Collector, receive: Receive, fail: Callable[[Exception], None]
) -> None:
    """Calls a function with each output of a request, including already queued outputs.

    Args:
        collector: from `AsyncLLM.add_request`. No `await` may come between the two calls.
        receive: called with each output. Its exceptions are passed to `fail`.
        fail: called with an exception of the engine. It must not raise.
    """

    def put(output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            fail(output)
            return
        try:
            receive(cast(RequestOutput, output))
        except (
            Exception
        ) as error:  # any error, because it would end the output handler and so all requests
            fail(error)

    before = collector.output
    collector.output = None
    setattr(collector, _PUT, put)
    if before is not None:
        put(before)
