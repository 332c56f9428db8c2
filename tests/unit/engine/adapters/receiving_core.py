"""vLLM's core of an engine, without the engine."""

import queue
from collections.abc import Sequence
from typing import Any

from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder


class Core(EngineCoreProc):
    """vLLM's core, of which only the receiving thread's part is run."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.failed: list[str] = []

    def receive(self, parts: Sequence[Any]) -> list[EngineCoreRequest]:
        """The requests of a message, in the order in which the core handles them."""
        decoded = MsgpackDecoder(EngineCoreRequest).decode(list(parts))
        self.input_queue.put_nowait(
            (EngineCoreRequestType.ADD, self.preprocess_add_request(decoded))
        )
        requests = []
        while not self.input_queue.empty():
            kind, (made, _) = self.input_queue.get_nowait()
            assert kind == EngineCoreRequestType.ADD
            requests.append(made)
        return requests

    def _handle_request_preproc_error(self, request: EngineCoreRequest) -> None:
        self.failed.append(request.request_id)
