"""Controllers: what is refused, and what a request does whose controller is disabled."""

import grpc
import pytest

from rheostat_engine import ControllerDisabled
from rheostat_server.engine.backend import Job
from rheostat_server.errors import InvalidConfig
from rheostat_server.steering import controlled as controllers
from rheostat_server.steering.controlled import CONTROLLED
from rheostat_wire.v1 import gain_pb2, generation_pb2, generation_service_pb2, steering_pb2

from ..conftest import Refusal, Running, rest
from ..fakes import ScriptedBackend
from ..messages import add, at_post1, probe, request
from ..watchers import Watcher, opening

SAMPLING = generation_pb2.Sampling(max_tokens=4)
GOES_ON = gain_pb2.ON_DISABLED_CONTINUE


def controlled(name: str = "pi", **fields: object):
    """A request with a controller."""
    own = steering_pb2.Steering(interventions=[at_post1(add=add().add)])
    fields.setdefault("steering", own)
    fields.setdefault("probes", [probe()])
    on_disabled = fields.pop("on_disabled", None)
    control = gain_pb2.Controlled(controller_name=name, on_disabled=on_disabled)
    return request(sampling=fields.pop("sampling", SAMPLING), controlled=control, **fields)


class Disables(ScriptedBackend):
    """Its workers disable the controller of each request in its first step."""

    def _signal(self, job: Job, start: int, end: int) -> None:
        super()._signal(job, start, end)
        if start == 0:
            self.deliver(ControllerDisabled(job.plan.request_id, "pi", "it raised", 3))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some plugins are installed."""
    found = {"pi", "other"}
    monkeypatch.setattr("rheostat_server.serve.entry_points", lambda group, name: {name} & found)


@pytest.fixture
async def running(starter) -> Running:
    return await starter(controllers=("pi", "other"))


async def test_a_plan_carries_its_controller_and_a_table_with_gains(running: Running) -> None:
    events = await running.client.generate(controlled())
    assert events[-1].receipt.controller.controller_name == "pi"
    assert not events[-1].receipt.controller.disabled_reason
    (job,) = running.backend.jobs
    control = job.plan.control
    assert control is not None
    assert (control.name, control.columns, control.gains, control.first) == ("pi", (0, 1), 1, 3)
    assert [act.gain for act in control.acts.acts] == [0, None]
    assert [act.gain for act in job.plan.acts] == [None, None]
    assert job.plan.private_from == 3


@pytest.mark.parametrize(
    ("message", "code", "reason", "field"),
    [
        (controlled(""), "INVALID_ARGUMENT", "MISSING_FIELD", "controlled.controller_name"),
        (controlled("no"), "NOT_FOUND", "CONTROLLER_NOT_FOUND", "controlled.controller_name"),
        (controlled(on_disabled=0), "INVALID_ARGUMENT", "UNKNOWN_ENUM", "controlled.on_disabled"),
        (controlled(probes=[]), "INVALID_ARGUMENT", "INVALID_VALUE", "controlled"),
        (controlled(steering=None), "INVALID_ARGUMENT", "INVALID_VALUE", "controlled"),
        (
            controlled(
                steering=steering_pb2.Steering(interventions=[at_post1(add=add().add)] * 17)
            ),
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "controlled",
        ),
    ],
)
async def test_what_cannot_be_controlled_is_refused(
    running: Running, message, code: str, reason: str, field: str
) -> None:
    refusal = await running.client.refusal(message)
    assert refusal.brief == (grpc.StatusCode[code], f"REASON_{reason}", field)


async def test_the_changes_of_gains_are_limited(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "MAX_GAIN_CHANGES", 4)
    assert (await running.client.generate(controlled()))[-1].HasField("receipt")
    refusal = await running.client.refusal(
        controlled(sampling=generation_pb2.Sampling(max_tokens=5))
    )
    assert refusal.brief[1:] == ("REASON_INVALID_VALUE", "controlled")


async def test_a_baseline_has_no_controller(running: Running) -> None:
    events = await running.client.generate(controlled(with_baseline=True))
    assert events[-1].receipt.controller.controller_name == "pi"
    found = [job.plan.control for job in running.backend.jobs]
    assert [one is None for one in found].count(False) == 1
    assert len(found) > 1


async def test_a_watch_that_steers_does_not_read_it(running: Running) -> None:
    watcher = await Watcher.open(running, opening(steers=True))
    await running.client.generate(controlled())
    assert (await watcher.until("ended")).ended.missed_reason == CONTROLLED
    (job,) = running.backend.jobs
    assert job.plan.control is not None


async def test_a_session_has_no_controller(running: Running) -> None:
    begin = generation_service_pb2.SessionRequest(start=controlled())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(running.client.generation.Session(iter([begin])))
    refusal = Refusal.of(caught.value)
    assert (refusal.brief[1:]) == ("REASON_NOT_SUPPORTED", "start.controlled")


async def test_a_request_fails_if_its_controller_is_disabled_and_later_ones_are_refused(
    starter,
) -> None:
    running = await starter(Disables(), controllers=("pi", "other"))
    for _ in range(2):
        refusal = await running.client.refusal(controlled())
        assert refusal.brief[:2] == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "REASON_CONTROLLER_DISABLED",
        )
        assert "it raised" in refusal.message
    assert refusal.brief[2] == "controlled.controller_name"
    assert len(running.backend.jobs) == 1


class DisablesLate(ScriptedBackend):
    """Its workers disable the controller of each request when all of its tokens are sampled."""

    def _signal(self, job: Job, start: int, end: int) -> None:
        super()._signal(job, start, end)
        if end == len(job.prompt) + job.sampling.max_tokens:
            self.deliver(ControllerDisabled(job.plan.request_id, "pi", "it raised", end - 1))


async def test_a_request_whose_every_position_was_decided_does_not_fail(starter) -> None:
    running = await starter(DisablesLate(overrun=1), controllers=("pi",))
    events = await running.client.generate(controlled())
    assert events[-1].receipt.generated_token_count == 4
    assert not events[-1].receipt.controller.disabled_reason
    refusal = await running.client.refusal(controlled())
    assert refusal.brief[1] == "REASON_CONTROLLER_DISABLED"


async def test_a_server_does_not_start_with_a_controller_that_is_not_installed(starter) -> None:
    with pytest.raises(InvalidConfig, match="nobody"):
        await starter(controllers=("nobody",))


async def test_a_request_goes_on_without_its_controller(starter) -> None:
    running = await starter(Disables(), controllers=("pi",))
    events = await running.client.generate(controlled(on_disabled=GOES_ON))
    receipt = events[-1].receipt
    assert receipt.generated_token_count == 4
    assert receipt.controller.disabled_reason == "it raised"
    (one,) = receipt.controller.disabled_from
    assert (one.sample, one.position) == (0, 3)
