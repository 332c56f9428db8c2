"""Makes random calls of causal tracing on a server, and checks how each of them ended."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import numpy as np
from google.protobuf.message import Message

from rheostat_wire.v1 import run_service_pb2, tensor_pb2

from .conftest import Refusal, Running
from .streams import settled
from .tracing_calls import Call

AT_ONCE = 24
PATIENCE = 60
"""Seconds without any request of any call, after which a call that runs counts as hanging.

A large sweep may take minutes beside others on a busy machine.
"""
_FAILED_HERE = "Internal error from Core"
"""What gRPC's client says if it writes to a call that ends meanwhile. No server says so."""
Code = grpc.StatusCode
_CROSSED = {
    "REASON_RUN_NOT_FOUND",
    "REASON_RUN_EXISTS",
    "REASON_RUN_IN_USE",
}
"""How valid calls may fail, because other calls made or deleted their run."""
_REFUSED = {
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.FAILED_PRECONDITION,
    Code.RESOURCE_EXHAUSTED,
    Code.ALREADY_EXISTS,
}
_STREAMS = ("Sweep", "ReadRun", "Lens")


class End(NamedTuple):
    """How a call ended."""

    call: Call
    refusal: Refusal | None
    """None: it ran to its end."""
    answers: list[Message]

    @property
    def again(self) -> bool:
        """Whether the server was full, and asks to try again."""
        return self.refusal is not None and self.refusal.retry


@dataclass
class Outcome:
    """What came of all calls."""

    ends: Counter[str] = field(default_factory=Counter)
    """By method and end."""
    cells: int = 0
    problems: list[str] = field(default_factory=list)


async def play(running: Running, drawn: Iterable[Call]) -> Outcome:
    """Makes calls, `AT_ONCE` at a time, and leaves the server empty."""
    outcome = Outcome()
    tasks = len(asyncio.all_tasks())
    waiting = iter(drawn)

    async def work() -> None:
        for call in waiting:
            try:
                while (end := await _patiently(running, call)).again:
                    await asyncio.sleep(0.02)
            except TimeoutError:
                outcome.problems.append(f"{call.number} {call.method} hangs (odd: {call.odd})")
            else:
                _judge(end, outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    outcome.problems += await _left(running, tasks)
    return outcome


def _method(running: Running, name: str):
    services = running.client
    if name == "Sweep":
        return services.sweep.Sweep
    return getattr(services.lens if name in ("Lens", "Attribute") else services.runs, name)


async def _patiently(running: Running, call: Call) -> End:
    made = asyncio.create_task(_end_of(running, call))
    while True:
        before = len(running.backend.jobs)
        await asyncio.wait({made}, timeout=PATIENCE)
        if made.done():
            return await made
        if len(running.backend.jobs) == before:
            made.cancel()
            raise TimeoutError


async def _end_of(running: Running, call: Call) -> End:
    answers: list[Message] = []
    method = _method(running, call.method)
    made = method(_parts(call) if call.method == "PutRun" else call.messages[0])
    if call.seconds is not None:
        asyncio.get_running_loop().call_later(call.seconds, made.cancel)
    try:
        if call.method in _STREAMS:
            while (answer := await made.read()) is not grpc.aio.EOF:
                answers.append(answer)
                if call.answers is not None and len(answers) > call.answers:
                    made.cancel()
        else:
            answers.append(await made)
    except grpc.aio.AioRpcError as error:
        if error.details() == _FAILED_HERE:  # the server's status is lost: ask again
            return End(call, Refusal(Code.CANCELLED, "", retry=not call.cut), answers)
        return End(call, Refusal.of(error), answers)
    except asyncio.CancelledError:
        if not call.cut:
            raise
        return End(call, Refusal(Code.CANCELLED, ""), answers)
    return End(call, None, answers)


async def _parts(call: Call) -> AsyncIterator[Message]:
    for number, message in enumerate(call.messages):
        if call.answers is not None and number > call.answers:
            raise ConnectionError("the client goes away")
        yield message
        await asyncio.sleep(0)


def _judge(end: End, outcome: Outcome) -> None:
    call, refusal = end.call, end.refusal
    kind = "odd" if call.odd else "cut" if call.cut else "valid"
    outcome.ends[f"{call.method} {kind} {_name(refusal)}"] += 1
    problem = _check(end.answers, call) if refusal is None else _check_refusal(refusal, call)
    if problem:
        outcome.problems.append(f"{call.number} {call.method} {kind} {call.odd}: {problem}")
    if call.method == "Sweep":
        outcome.cells += sum(one.HasField("cell") for one in end.answers)


def _name(refusal: Refusal | None) -> str:
    if refusal is None:
        return "OK"
    return refusal.reason or refusal.code.name


def _check_refusal(refusal: Refusal, call: Call) -> str:
    if call.cut and refusal.code in (Code.CANCELLED, Code.UNKNOWN):
        return ""
    if refusal.code not in _REFUSED:
        return f"ended with {refusal}"
    if not refusal.reason.startswith("REASON_") or not refusal.message:
        return f"ended without a reason: {refusal}"
    named = refusal.field or refusal.message.startswith("one of ")  # then it names the fields
    if not (named or refusal.resource or refusal.retry):
        return f"does not say what is wrong: {refusal}"
    # Noise of several tokens, twice, may take more rows than the scripted engine has.
    too_large = call.method == "Sweep" and refusal.reason == "REASON_BANK_FULL"
    if not call.odd and not too_large and refusal.reason not in _CROSSED:
        return f"a valid call was refused: {refusal}"
    return ""


def _check(answers: list[Message], call: Call) -> str:
    """What is wrong with the answers of a call that ran to its end."""
    match call.method:
        case "Sweep":
            return _check_sweep(answers)
        case "Lens":
            started, *others = answers
            places = len(started.started.sites) * sum(p.count for p in started.started.positions)
            if sum(one.rows.row_count for one in others) != places:
                return "rows of the lens are missing"
        case "Attribute":
            (answer,) = answers
            assert answer.contributions.dtype == tensor_pb2.DTYPE_FLOAT64
            values = np.frombuffer(answer.contributions.inline, "<f8")
            if not np.isfinite(values).all():
                return "a contribution is not finite"
    return ""


def _check_sweep(answers: list[Message]) -> str:
    kinds = [one.WhichOneof("event") for one in answers]
    if kinds[0] != "started" or kinds[-1] != "summary" or kinds.count("summary") != 1:
        return f"events come in the order {kinds}"
    cells = [one.cell for one in answers if one.HasField("cell")]
    wanted = answers[0].started.cell_count
    wanted += sum(one.phase.added_cell_count for one in answers if one.HasField("phase"))
    if len(cells) != wanted or len({one.index for one in cells}) != wanted:
        return f"{len(cells)} cells came, {wanted} were announced"
    for cell in cells:
        if bool(cell.values) == cell.HasField("error"):
            return f"cell {cell.index} has values and an error, or neither"
        if not np.isfinite([*cell.values, *cell.standard_errors, *cell.pair_values]).all():
            return f"cell {cell.index} has odd values {cell.values}"
    return ""


async def _left(running: Running, tasks: int) -> list[str]:
    """What the server holds beyond its runs, once nothing runs; deletes the runs."""
    await settled(running)
    manager = running.manager
    left = []
    request = run_service_pb2.ListRunsRequest(page_size=1000)
    pages = [await running.client.runs.ListRuns(request)]
    while pages[-1].next_page_token:
        request.page_token = pages[-1].next_page_token
        pages.append(await running.client.runs.ListRuns(request))
    for run in (run for page in pages for run in page.runs):
        try:
            message = run_service_pb2.DeleteRunRequest(run_id=run.run_id)
            await running.client.runs.DeleteRun(message)
        except grpc.aio.AioRpcError as error:
            refusal = Refusal.of(error)
            if refusal.reason != "REASON_RUN_NOT_FOUND":  # its lease has ended meanwhile
                left.append(f"run {run.run_id} stays: {refusal}")
    stats = await settled(running)
    held = {
        "runs": stats.run_count,
        "bytes of runs": stats.run_bytes,
        "leaks": stats.leaked_count,
        "requests": manager.open_requests,
        "requests in the foreground": manager.foreground_requests,
        "requests in the ledger": manager.ledger.requests,
        "bank rows": manager.ledger.used("bank_rows"),
        "capture rows": manager.ledger.used("capture_rows"),
        "pins": manager.store.pins,
        "bytes of buffers": manager.budget.used,
        "waiting requests": manager.admission_queue.waiting,
    }
    left += [f"{name}: {count}" for name, count in held.items() if count]
    for _ in range(200):
        if len(asyncio.all_tasks()) <= tasks:
            break
        await asyncio.sleep(0.01)
    else:
        names = [str(task.get_coro()) for task in asyncio.all_tasks()]
        left.append(f"tasks: {len(names)}, at first {tasks}: {names}")
    return left
