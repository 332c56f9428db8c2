"""Requests that differ only in the numbers of their gates are compiled as if each came alone."""

from dataclasses import replace

import numpy as np
import pytest

from rheostat_server import errors
from rheostat_server.admission import admit as admission
from rheostat_server.admission.admit import AdmissionContext
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.compiled_requests import CompiledRequests
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Name, Vector, make_vector
from rheostat_wire.v1 import gate_pb2, types_pb2, vector_pb2

from ..admissions import admission_context, admitted, named, refused, stored
from ..fakes import WIDTH
from ..messages import above, add, at_post1, capture, probe, request


def keeping() -> AdmissionContext:
    at = admission_context()
    stored(at)
    return replace(at, compiled=CompiledRequests(at.store))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each request that is compiled."""
    seen: list[object] = []
    compiled = admission.compile_plan

    def noted(*args):
        seen.append(args)
        return compiled(*args)

    monkeypatch.setattr(admission, "compile_plan", noted)
    return seen


def unnamed(at: AdmissionContext, value: float) -> Vector:
    data = np.full(WIDTH, value, "<f4").tobytes()
    vector = make_vector(FloatType.FLOAT32, 1, WIDTH, data, "v")
    at.store.put(vector)
    return vector


def asked(*gates: gate_pb2.Gate | None, length: int = 3, **fields: object):
    steer = [at_post1(add=add(named()).add, gate=gate) for gate in gates]
    ids = types_pb2.TokenIds(ids=[5, 6, 7, 8][:length])
    fields = {"probes": [probe()], **fields}
    return request(token_ids=ids, steer=steer, request_id="r", **fields)


def gate(bound: float = 0.5, **fields: object) -> gate_pb2.Gate:
    return gate_pb2.Gate(conditions=[above(bound)], **fields)


def step(threshold: float, **fields: object) -> gate_pb2.Gate:
    return gate(step=gate_pb2.Step(threshold=threshold), **fields)


def check_equal(found: AdmittedRequest, alone: AdmittedRequest) -> None:
    own, other = found.plan.packed_acts, alone.plan.packed_acts
    assert found.plan == alone.plan
    assert found.plan.to_wire() == alone.plan.to_wire()
    for one, another in zip(own.needs, other.needs, strict=True):
        np.testing.assert_array_equal(one, another)
    assert (own.ruled, own.gate_states, own.plan_cost) == (
        other.ruled,
        other.gate_states,
        other.plan_cost,
    )
    for one, another in zip(found.interventions, alone.interventions, strict=True):
        assert one == another
        for field in ("acts", "acting_sites", "site_indices", "site_fields", "receipt"):
            assert getattr(one, field) == getattr(another, field)
    assert found.vectors == alone.vectors
    assert (found.signals is None) == (alone.signals is None)
    if found.signals is not None and alone.signals is not None:
        assert found.signals.gates == alone.signals.gates
        assert found.signals.table == alone.signals.table
    assert (found.work, found.read_count) == (alone.work, alone.read_count)


SIGMOID = gate_pb2.Sigmoid(sharpness=2.0, threshold=0.25)


@pytest.mark.parametrize(
    "gates",
    [
        ([gate(0.5)], [gate(0.75)]),
        ([step(0.5), None], [step(0.25), None]),
        ([gate(0.5), gate(0.6)], [gate(0.7), gate(0.8)]),
        ([gate(0.5), gate(0.5)], [gate(0.7), gate(0.7)]),
        ([gate(0.5, signals=True)], [gate(0.6, signals=True)]),
        (
            [gate(hold=gate_pb2.Hold(tokens=3), sigmoid=gate_pb2.Sigmoid(sharpness=4.0))],
            [gate(hold=gate_pb2.Hold(tokens=3), sigmoid=SIGMOID)],
        ),
    ],
)
def test_gates_with_other_numbers_are_not_compiled_again(gates, compilations) -> None:
    at = keeping()
    first, second = (asked(*some, captures=[capture()]) for some in gates)
    admitted(first, at)
    found = admitted(second, at)
    assert len(compilations) == 1
    check_equal(found, admitted(second, replace(at, compiled=None)))
    assert admitted(second, at).plan.packed_acts is found.plan.packed_acts


@pytest.mark.parametrize(
    ("gates", "fields"),
    [
        ([gate(0.6, invert=True)], {}),
        ([gate(0.6, hold=gate_pb2.Hold(tokens=3))], {}),
        ([gate(0.6, sigmoid=SIGMOID)], {}),
        ([gate_pb2.Gate(conditions=[above(0.6, after_prompt=True)])], {}),
        ([gate_pb2.Gate(conditions=[above(0.6, stays_above=0.5)])], {}),
        ([gate_pb2.Gate(conditions=[above(0.6), above(0.7)])], {}),
        ([gate(0.6, signals=True)], {}),
        ([gate(0.6)], {"length": 4}),
        ([gate(0.6)], {"probes": [probe(bias=1.0)]}),
    ],
)
def test_what_differs_in_more_than_numbers_is_compiled(gates, fields, compilations) -> None:
    at = keeping()
    admitted(asked(gate()), at)
    found = admitted(asked(*gates, **fields), at)
    assert len(compilations) == 2
    check_equal(found, admitted(asked(*gates, **fields), replace(at, compiled=None)))


def test_gates_that_become_equal_or_different_are_compiled(compilations) -> None:
    at = keeping()
    bounds = (0.5, 0.6), (0.7, 0.7), (0.8, 0.9)
    for pair in bounds:
        message = asked(*map(gate, pair))
        check_equal(admitted(message, at), admitted(message, replace(at, compiled=None)))
    assert len(compilations) == 2 * len(bounds)


def test_a_malformed_gate_is_refused_in_the_same_way() -> None:
    at = keeping()
    admitted(asked(gate()), at)
    wrong = [
        gate(float("nan")),
        gate_pb2.Gate(conditions=[above(0.5, below=0.25)]),
        gate_pb2.Gate(conditions=[above(0.5, "other")]),
        gate_pb2.Gate(),
    ]
    for one in wrong:
        assert refused(asked(one), at) == refused(asked(one), replace(at, compiled=None))


def test_a_name_that_moved_is_looked_up_again(compilations) -> None:
    at = keeping()
    admitted(asked(gate()), at)
    vector = stored(at, name="joy", value=3.0)
    assert at.store.names["joy"] == Name(vector.digest, "", None)
    assert vector in admitted(asked(gate(0.6)), at).vectors
    assert len(compilations) == 2


def test_an_evicted_vector_is_not_found_and_takes_no_memory() -> None:
    at = admission_context(capacity=4 * WIDTH)
    at = replace(at, compiled=CompiledRequests(at.store))
    vector = unnamed(at, 2.0)
    by_digest = vector_pb2.VectorRef(digest=vector.digest)

    def message(bound: float):
        steer = [at_post1(add=add(by_digest).add, gate=gate(bound))]
        return request(steer=steer, probes=[probe()])

    admitted(message(0.5), at)
    assert at.compiled is not None
    assert at.compiled._templates
    unnamed(at, 3.0)
    assert not at.compiled._templates
    with pytest.raises(errors.VectorNotFound):
        admitted(message(0.6), at)
