"""Cost of a subscriber for the requests that it observes, while it reads and while it does not.

64 clients generate without a pause. The arms take turns: nobody watches; a subscriber reads every
row of the middle layer; one reads nothing for the whole turn, and rows that find no room are lost,
or wait on disk. Server and subscriber are a process each; the clients share some, whose busiest
must not be what the turns wait for: its CPU time stands in the result.

    rheostat bench stalled --out results
    rheostat bench stalled --shape qwen3-8b --tokens 128 --out results
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import rheostat
from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker, together
from rheostat_bench.served import (
    add_client_argument,
    address,
    connected,
    prompts,
    serving,
)
from rheostat_bench.summaries import Figures
from rheostat_bench.watching import Watcher, watching

_CLIENTS = 64
_PROMPT = 32
_BUFFER = 64 << 20
_CREDIT = 1 << 20
"""Bytes that a subscriber that reads nothing lets come."""


class Arm(NamedTuple):
    """Who watches."""

    name: str
    reads: bool | None
    """Whether the subscriber reads; None: there is none."""
    overload: Literal["drop_newest", "spill"] = "drop_newest"


ARMS = (
    Arm("nobody watches", None),
    Arm("reads", True),
    Arm("stands still, rows are lost", False),
    Arm("stands still, rows wait on disk", False, "spill"),
)
"""What is measured."""


class Turn(NamedTuple):
    """What came of an arm's turn."""

    seconds: float
    tokens: int
    """That came in it."""
    longest: float
    """Seconds that the longest of the requests that ended in it took."""
    lost_rows: int
    """Rows that were reported to a reader as lost."""
    waiting_rows: int
    """Rows that waited on disk at the end."""
    busiest: float = 0.0
    """CPU seconds per second of the clients' busiest process."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class _Asked(NamedTuple):
    """What came of one process's clients."""

    seconds: float
    tokens: int
    longest: float
    cpu: float


async def _ask(engine: rheostat.aio.Engine, clients: int, tokens: int, seconds: float) -> _Asked:
    """An order: requests of so many clients for so long. Those under way at the end still end."""
    came, longest = 0, 0.0
    over = False

    async def client() -> None:
        nonlocal came, longest
        while not over:
            (prompt,) = prompts(1, _PROMPT)
            began = time.perf_counter()
            stream = engine.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
            async for event in stream:
                if isinstance(event, rheostat.Tokens) and not over:
                    came += len(event.token_ids)
            if not over:
                longest = max(longest, time.perf_counter() - began)

    began, used = time.perf_counter(), time.process_time()
    running = [asyncio.create_task(client()) for _ in range(clients)]
    await asyncio.sleep(seconds)
    over, took = True, time.perf_counter() - began
    cpu = time.process_time() - used
    await asyncio.gather(*running)
    return _Asked(took, came, longest, cpu)


class _Stage:
    """The server of all turns, and the processes of its clients and its subscriber."""

    def __init__(
        self,
        target: str,
        layer: int,
        askers: Sequence[Worker[rheostat.aio.Engine]],
        watcher: Worker[Watcher],
        tokens: int,
    ) -> None:
        self._target = target
        self._capture = rheostat.Capture("resid_post", layers=layer)
        self._askers = askers
        self._watcher = watcher
        self._tokens = tokens

    @contextmanager
    def _watched(self, arm: Arm) -> Iterator[None]:
        if arm.reads is None:
            yield
            return
        options = rheostat.SubscribeOptions(
            every=True,
            capture=self._capture,
            overload=arm.overload,
            buffer_bytes=_BUFFER,
            credit=64 << 20 if arm.reads else _CREDIT,
        )
        read = sys.maxsize if arm.reads else None
        self._watcher.do(partial(Watcher.open, options=options, requests=read))
        yield
        self._watcher.do(Watcher.close)

    def turn(self, arm: Arm, seconds: float) -> Turn:
        """One turn of an arm."""
        count = len(self._askers)
        orders = [
            partial(
                _ask,
                clients=_CLIENTS // count + (number < _CLIENTS % count),
                tokens=self._tokens,
                seconds=seconds,
            )
            for number in range(count)
        ]
        with rheostat.connect(self._target) as engine, self._watched(arm):
            before = engine.stats()
            asked = together(self._askers, orders)
            after = engine.stats()
        return Turn(
            statistics.fmean(result.seconds for result in asked),
            sum(result.tokens for result in asked),
            max(result.longest for result in asked),
            after.dropped_row_count - before.dropped_row_count,
            after.spooled_row_count,
            max(result.cpu / result.seconds for result in asked),
        )


def summary(turns: Sequence[Sequence[Turn]]) -> Figures:
    """Of each arm, in the order of `ARMS`: medians, the spread, and beside nobody's."""
    idle = statistics.median(turn.rate for turn in turns[0])
    table: Figures = {}
    for arm, mine in zip(ARMS, turns, strict=True):
        rates = [turn.rate for turn in mine]
        table[arm.name] = {
            "tokens_per_s": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "percent": 100 * statistics.median(rates) / idle,
            "longest_request_s": max(turn.longest for turn in mine),
        }
    return table


def main() -> None:
    """Measures, prints a table and writes `stalled.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default=None)
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for stalled.json")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn")
    parser.add_argument("--tokens", type=int, default=32, help="of each request")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns: list[list[Turn]] = [[] for _ in ARMS]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = chosen(arguments, Path(scratch))
        spool = Path(scratch) / "spool"
        config = server_config(model, engines=1, requests=_CLIENTS, spool=str(spool))
        server = stack.enter_context(Worker(partial(serving, config), parent=True))
        target = server.do(address)
        with rheostat.connect(target) as engine:
            served = engine.model()
        askers = [
            stack.enter_context(Worker(partial(connected, target)))
            for _ in range(arguments.client_processes)
        ]
        watcher = stack.enter_context(Worker(partial(watching, target)))
        stage = _Stage(target, served.layer_count // 2, askers, watcher, arguments.tokens)
        for arm in ARMS:
            stage.turn(arm, min(3.0, arguments.seconds))
        for _ in range(arguments.repeats):
            for arm, mine in zip(ARMS, turns, strict=True):
                mine.append(stage.turn(arm, arguments.seconds))
                print(
                    f"{arm.name:32}{mine[-1].rate:9.0f} tokens/s, the busiest of the clients' "
                    f"processes {mine[-1].busiest:4.0%} of a core",
                    flush=True,
                )
    result = {
        "benchmark": "stalled",
        "measures": "64 clients beside a subscriber that reads or stands still",
        **described(model, served.engine.runner),
        "compiled": served.engine.compiled,
        "client_processes": arguments.client_processes,
        "layer": served.layer_count // 2,
        "clients": _CLIENTS,
        "prompt_tokens": _PROMPT,
        "tokens": arguments.tokens,
        "seconds": arguments.seconds,
        "repeats": arguments.repeats,
        "buffer_bytes": _BUFFER,
        "arms": {arm.name: arm._asdict() for arm in ARMS},
        "summary": summary(turns),
        "turns": {
            arm.name: [turn._asdict() for turn in mine]
            for arm, mine in zip(ARMS, turns, strict=True)
        },
    }
    (arguments.out / "stalled.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
