"""Where a subscription's payloads are read: in its messages, or in shared memory.

Invariant: what a reader is given is its own, and was checked after it was copied, unless it asked
for views. Shared memory is written again once it is acknowledged, by whoever has taken the
subscription up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rheostat._capture.encodings import (
    Decoded,
    Encoding,
    Numbers,
    checked,
    decoded,
    decoded_in_place,
    elements,
)
from rheostat._errors import Refused, ServerError
from rheostat._subscriptions.shared_memory import Mapping, Payload
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2


class View:
    """A tensor that is decoded where it lies, when it is asked for."""

    def __init__(
        self, tensor: tensor_pb2.Tensor, payload: bytes | Payload, is_valid: Callable[[], bool]
    ) -> None:
        """A view of a payload that can be read while ``is_valid()``.

        Raises ServerError if its parts do not fit, DataLoss if the checksum is wrong.
        """
        self._tensor = tensor
        self._payload = payload
        self._is_valid = is_valid
        self._decoded: Decoded | None = None
        checked(tensor, payload)
        self._elements = elements(tensor, payload)

    @property
    def elements(self) -> npt.NDArray[np.generic] | None:
        """The elements as they lie; None if the encoding is another than raw."""
        self._check()
        return self._elements

    @property
    def values(self) -> FloatArray:
        """As float32."""
        return self._numbers.values

    @property
    def encoding(self) -> Encoding:
        """How it travelled."""
        return self._numbers.encoding

    @property
    def max_error(self) -> FloatArray | None:
        """Largest error of each row's numbers."""
        return self._numbers.max_error

    @property
    def _numbers(self) -> Decoded:
        if self._decoded is None:
            self._check()
            self._decoded = decoded_in_place(self._tensor, self._payload)
        return self._decoded

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles hold the payload, because its memory ends with the acknowledgement."""
        self._check()
        payload = bytes(self._payload)
        self._check()  # another thread may have acknowledged it meanwhile
        tensor = tensor_pb2.Tensor()
        tensor.CopyFrom(self._tensor)
        for name in ("inline", "shm"):
            tensor.ClearField(name)
        return View, (tensor, payload, _always)

    def _check(self) -> None:
        if not self._is_valid():
            raise Refused(
                "these rows were acknowledged, and their memory may hold others: read or copy them "
                "before, or subscribe without views=True"
            )


def _always() -> bool:
    """A view that has its own copy of the payload stays valid."""
    return True


class Payloads:
    """The payloads of one subscription."""

    def __init__(self, wanted: bool | None, views: bool) -> None:
        """The subscription is not open yet.

        ``wanted``: through shared memory; None: if possible. ``views``: see `View`.
        """
        self.inline_reason: str | None = "the subscription does not stand yet"
        """Why they come in messages; None: large ones come through shared memory."""
        self._wanted = wanted
        self._views = views
        self._mapping: Mapping | None = None
        self._proof: bytes | None = None

    @property
    def refusal(self) -> Refused | None:
        """The error of a subscription that was to come through shared memory and can't."""
        if not self._wanted or self.inline_reason is None:
            return None
        return Refused(f"rows cannot come through shared memory: {self.inline_reason}")

    def begin(self, opened: capture_service_pb2.SubscribeOpened) -> None:
        """A call begins: finds out how its payloads come."""
        self.inline_reason = self._proof = None
        memory = opened.shared_memory
        if self._wanted is False:
            self.inline_reason = "shared_memory=False"
        elif not opened.HasField("shared_memory"):
            self.inline_reason = opened.inline_reason or "the subscription began without it"
        else:
            try:
                if self._mapping is None or self._mapping.name != memory.name:
                    self._mapping = Mapping(memory)
            except Refused as error:
                self.inline_reason = error.message
            else:
                self._proof = self._mapping.nonce

    def take_proof(self) -> bytes | None:
        """The proof to send to the server, once in a call."""
        proof, self._proof = self._proof, None
        return proof

    def read(self, tensor: tensor_pb2.Tensor, is_valid: Callable[[], bool]) -> Numbers:
        """The numbers of a tensor; ``is_valid``: whether shared memory still has it.

        Raises ServerError if its parts do not fit, DataLoss if the checksum is wrong.
        """
        kind = tensor.WhichOneof("payload")
        if kind == "shm" and self._mapping is not None:
            payload = self._mapping.payload(tensor.shm)
            if self._views:
                return View(tensor, payload, is_valid)
            return decoded_in_place(tensor, payload)
        if kind != "inline":
            raise ServerError("the server sent a tensor that cannot be read here")
        if self._views:
            return View(tensor, tensor.inline, _always)
        return decoded(tensor, tensor.inline)
