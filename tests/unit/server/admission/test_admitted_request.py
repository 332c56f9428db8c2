"""A copy of a request that asks another question has all other fields of the request."""

from dataclasses import fields
from typing import Any

import pytest

from rheostat_engine import Plan, Window
from rheostat_server.admission.admitted_request import AdmittedRequest


@pytest.mark.parametrize("captures", [True, False])
def test_a_copy_differs_only_in_its_question_and_its_captures(captures: bool) -> None:
    values: dict[str, Any] = {field.name: object() for field in fields(AdmittedRequest)}
    prompt: Any = object()
    sampling: Any = object()
    plan, windows = Plan("b"), (Window(1, 2, 0),)
    asked = AdmittedRequest(**values).with_question(
        "b", prompt, sampling, plan, captures=captures, windows=windows
    )
    expected = values | {"request_id": "b", "prompt": prompt, "sampling": sampling, "plan": plan}
    expected["windows"] = windows
    if not captures:
        expected |= {"unobserved": plan, "captures": (), "observer_captures": ()}
    assert {name: getattr(asked, name) for name in expected} == expected
