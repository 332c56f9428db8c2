"""Requests that are admitted or refused, without a server."""

import asyncio

import numpy as np
import pytest

from rheostat_server import errors
from rheostat_server.admission.admit import AdmissionContext, admit
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.prompts.prompts import Prompts
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Name, VectorStore, make_vector
from rheostat_wire.v1 import (
    vector_pb2,
)

from .characters import CharTokenizer
from .fakes import INFO, SITES, VOCABULARY, WIDTH


def admission_context(sites=SITES, tokenizer=True, capacity=1 << 20) -> AdmissionContext:
    prompts = Prompts(
        CharTokenizer() if tokenizer else None,
        vocabulary=VOCABULARY,
        model_tokens=INFO.model_tokens,
    )
    return AdmissionContext(INFO, sites, prompts, VectorStore(capacity, lambda digest: None))


def admitted(message, at: AdmissionContext | None = None) -> AdmittedRequest:
    return asyncio.run(admit(message, at or admission_context()))


def refused(message, at: AdmissionContext | None = None) -> tuple[type, str]:
    with pytest.raises(errors.RheostatError) as caught:
        admitted(message, at)
    return type(caught.value), caught.value.field


def stored(at: AdmissionContext, rows: int = 1, name: str = "joy", value: float = 2.0):
    data = np.full((rows, WIDTH), value, dtype="<f4").tobytes()
    vector = make_vector(FloatType.FLOAT32, rows, WIDTH, data, "v")
    at.store.put_named(vector, name, Name(vector.digest, "", None))
    return vector


def named(name: str = "joy") -> vector_pb2.VectorRef:
    return vector_pb2.VectorRef(name=name)
