"""Passes the outputs of a request to a function, in the process that reads the engine's answers.

Why
    `AsyncLLM.generate` needs a task for each request. vLLM's output handler puts an output into the
    request's collector, which wakes the task. A function that the collector calls needs neither a
    task nor a wake-up.
How
    `AsyncLLM.add_request` checks and sends the request, and returns its collector. From then on
    `put` of this one collector calls the function. Everything else remains vLLM's: the checks, the
    output handler, the detokenizer, and `AsyncLLM.abort`.
What the function may not do
    The output processor calls it while it iterates over the running requests. So the function may
    not abort a request before it returns.
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
    """Calls a function with each output of a request, including outputs that are queued already.

    Args:
        collector: from `AsyncLLM.add_request`; no task may have waited since that call.
        receive: is called with each output. Its errors are passed to `fail`.
        fail: is called with an error of the engine. It may not raise an error.
    """

    def put(output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            fail(output)
            return
        try:
            receive(cast(RequestOutput, output))
        except Exception as error:  # it would end the output handler, and all requests
            fail(error)

    before = collector.output
    collector.output = None
    setattr(collector, _PUT, put)
    if before is not None:
        put(before)
