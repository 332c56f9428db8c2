"""How a server ends: what runs is finished, what comes is refused, nothing hangs.

Servers of other tests are ended here, because each start takes seconds.
`tests/integration/conftest.py` sorts these tests behind all others of the same server.
"""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rheostat

from ..engine.forked import check_vector_instructions_once
from .conftest import Server, command, free_port, wait_until_serving
from .test_buf_curl import ENDS_THE_SERVER, curl

pytestmark = pytest.mark.integration

FIRST_REQUESTS: tuple[dict[str, Any], ...] = (
    {"logprobs": 3, "temperature": 0},
    {"logprobs": 3, "n": 3},
    {"prompt_logprobs": 3, "temperature": 0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"seed": 3, "n": 2},
    {"presence_penalty": 0.2, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"stop": ["."], "capture": rheostat.Capture("resid_post", layers=1)},
)
"""Requests of which a new engine would compile some for seconds."""


def test_first_requests_compile_nothing_and_a_drain_finishes_what_runs(tmp_path: Path) -> None:
    """The server is started by its command; the others are forked."""
    check_vector_instructions_once()
    port = free_port()
    compiled = tmp_path / "compiled"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(
                "demo", port, "--enforce-eager", "--max-model-len=2048", "--kv-cache-memory-mib=64"
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compiled)},
        )
    target = f"127.0.0.1:{port}"
    try:
        wait_until_serving(target, process, log)
        with rheostat.connect(target) as client:
            assert_unused(client)
            before = files_below(compiled)
            assert before, "the server has compiled nothing, or elsewhere"
            for options in FIRST_REQUESTS:
                client.generate("My day was", max_tokens=4, **options)
            assert files_below(compiled) == before
            stream = client.stream("My day was", max_tokens=1500, ignore_eos=True, temperature=0)
            next(stream)
            answers: list[subprocess.CompletedProcess[str]] = []
            drain = threading.Thread(
                target=lambda: answers.append(curl(target, ENDS_THE_SERVER, {}))
            )
            drain.start()
            assert until_refused(client) == "REASON_DRAINING"
            assert client.stats().running_request_count == 1
            assert len(stream.result().token_ids) == 1500
            drain.join(60)
            assert json.loads(answers[0].stdout)["finishedRequestCount"] >= 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-2000:]
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


def files_below(folder: Path) -> set[Path]:
    """Every file in a folder and in those within it."""
    return {path for path in folder.rglob("*") if path.is_file()}


def assert_unused(client: rheostat.Engine) -> None:
    """The statistics show nothing of the requests that the server ran before it served."""
    stats = client.stats()
    assert (stats.admitted_count, stats.captured_row_count, stats.left_bytes) == (0, 0, 0)
    assert (stats.used_bank_row_count, stats.vector_count, stats.leaked_count) == (0, 0, 0)
    assert stats.prefix_queried_token_count == 0
    assert set(stats.steps.values()) == {0}


def until_refused(client: rheostat.Engine) -> str | None:
    """Sends small requests until the server takes none; the reason that it gives."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            client.generate("My day was", max_tokens=1)
        except rheostat.Unavailable as error:
            return error.reason
        time.sleep(0.05)
    return None


def test_a_server_that_is_killed_takes_its_engine_and_what_it_runs_with_it(
    tight_server: Server,
) -> None:
    process = tight_server.process
    with rheostat.connect(tight_server.target) as client:
        # Half of the samples run. The others wait.
        stream = client.stream("My day was", max_tokens=480, ignore_eos=True, n=64)
        next(event for event in stream if isinstance(event, rheostat.Tokens))
        ours = descendants(process.pid)
        assert len(ours) >= 2
        process.kill()
        process.wait(60)
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{one}").exists() for one in ours):
            assert time.monotonic() < deadline, tight_server.log.read_text()[-2000:]
            time.sleep(0.2)


def test_a_server_whose_engine_is_killed_ends_its_requests_and_then_itself(
    compiled_server: Server,
) -> None:
    process, log = compiled_server.process, compiled_server.log
    with (
        rheostat.connect(compiled_server.target) as at,
        at.subscribe(every=True, capture=rheostat.Capture("resid_post", 3)) as watching,
    ):
        stream = at.stream("My day was", max_tokens=480, ignore_eos=True)
        next(event for event in stream if isinstance(event, rheostat.Tokens))
        (engine,) = (one for one in descendants(process.pid) if is_engine(one))
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(rheostat.Unavailable) as lost:
            stream.result()
        assert lost.value.reason == "REASON_ENGINE_LOST"
        with pytest.raises(rheostat.Unavailable):
            list(watching)
        with pytest.raises(rheostat.Unavailable):
            at.generate("My day was", max_tokens=1)
        assert process.wait(60) == 9, log.read_text()[-2000:]
        assert "\nrheostat: the server has ended: " in log.read_text()


def is_engine(pid: int) -> bool:
    """Whether a process is vLLM's engine core."""
    return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that they have."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        children = {int(child) for child in (task / "children").read_text().split()}
        found |= children.union(*map(descendants, children))
    return found


def test_a_server_that_is_terminated_ends_what_runs_without_a_traceback(server: Server) -> None:
    assert_termination_ends_what_runs(server)


def test_front_ends_and_an_engine_in_two_processes_end_alike(small_server: Server) -> None:
    assert_termination_ends_what_runs(small_server)


def assert_termination_ends_what_runs(server: Server) -> None:
    """Sends the signal to the server's whole process group, as Ctrl-C and `timeout` do."""
    before = len(server.log.read_text())
    with rheostat.connect(server.target) as client:
        stream = client.stream("My day was", max_tokens=300, ignore_eos=True)
        next(event for event in stream if isinstance(event, rheostat.Tokens))
        os.killpg(server.process.pid, signal.SIGTERM)
        assert stream.result().finish_reason == "length"
    assert server.process.wait(60) == 0
    said = server.log.read_text()[before:]
    assert "Traceback" not in said, said[-4000:]
    assert "EngineDeadError" not in said
    assert "force killing" not in said, "vLLM has killed its engine, which did not end in time"
    assert "leaked" not in said
