"""The payloads of a subscription: inside its messages, or in shared memory.

A reader gets its own copy of the rows, whose checksum was verified after copying, unless it asked
for views. The server overwrites shared memory once it is acknowledged, also by another client that
resumed the subscription.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rheostat._capture.encodings import (
    Decoded,
    check_crc,
    decoded,
    decoded_in_place,
    elements,
)
from rheostat._errors import Refused, ServerError
from rheostat._subscriptions.shared_memory import Mapping, Payload
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2


class View:
    """A tensor that is decoded in place, at its first access."""

    def __init__(
        self, tensor: tensor_pb2.Tensor, payload: bytes | Payload, is_valid: Callable[[], bool]
    ) -> None:
        """Raises as `decoded`. The payload may be read while ``is_valid()`` returns True."""
        self._tensor = tensor
        self._payload = payload
        self._is_valid = is_valid
        self._decoded: Decoded | None = None
        check_crc(tensor, payload)
        self._elements = elements(tensor, payload)

    @property
    def elements(self) -> npt.NDArray[np.generic] | None:
        """The elements, not copied; None if the encoding is not "raw"."""
        self._check()
        return self._elements

    @property
    def decoded(self) -> Decoded:
        """The numbers, which are decoded at the first access."""
        if self._decoded is None:
            self._check()
            self._decoded = decoded_in_place(self._tensor, self._payload)
        return self._decoded

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles own the payload, whose shared memory is valid until it is acked."""
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
                "these rows were acknowledged, and other rows may overwrite their memory: read or "
                "copy them before, or subscribe without views=True"
            )


def _always() -> bool:
    """A view that has its own copy of the payload stays valid."""
    return True


class Payloads:
    """The payloads of one subscription."""

    def __init__(self, wanted: bool | None, views: bool) -> None:
        """``wanted``: require or refuse shared memory; None: use it if possible."""
        self.inline_reason: str | None = "the subscription is not open yet"
        """Why payloads are sent in messages; None: large ones are sent through shared memory."""
        self._wanted = wanted
        self._views = views
        self._mapping: Mapping | None = None
        self._proof: bytes | None = None

    @property
    def refusal(self) -> Refused | None:
        """The error if shared memory is required and cannot be used."""
        if not self._wanted or self.inline_reason is None:
            return None
        return Refused(f"rows cannot be sent through shared memory: {self.inline_reason}")

    def begin(self, opened: capture_service_pb2.SubscribeOpened) -> None:
        """Maps the shared memory of a new call, or sets `inline_reason`."""
        self.inline_reason = self._proof = None
        memory = opened.shared_memory
        if self._wanted is False:
            self.inline_reason = "shared_memory=False"
        elif not opened.HasField("shared_memory"):
            self.inline_reason = opened.inline_reason or "the subscription was opened without it"
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

    def read(self, tensor: tensor_pb2.Tensor, is_valid: Callable[[], bool]) -> Decoded | View:
        """The numbers of a tensor. Raises as `decoded`.

        ``is_valid`` returns whether shared memory still has the payload.
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
