"""A server that cannot start says why in one line."""

import json
import os
import shutil
from pathlib import Path

import pytest

from .conftest import MODEL, ONE_PROCESS, arguments, free_port
from .forked_servers import ForkedServer, Order

SMALL = ("--enforce-eager", "--front-ends", "0", "--kv-cache-memory-mib", "64")


def ended(folder: Path, model: str, *options: str) -> tuple[int, str]:
    """The exit code of a server that does not start, and its line."""
    log = folder / "log"
    order = arguments(model, free_port(), *SMALL, *options)
    process = ForkedServer(Order(order, dict(os.environ), str(log), own_group=False))
    try:
        code = process.wait(120)
    finally:
        process.kill()
    (line,) = [one for one in log.read_text().splitlines() if one.startswith("rheostat: ")]
    return code, line


@pytest.mark.parametrize("options", [(), ("--distributed-executor-backend", ONE_PROCESS)])
def test_a_worker_that_cannot_load_the_model_is_asked_why(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    os.truncate(model / "model.safetensors", 1 << 20)
    code, line = ended(tmp_path, str(model), *options)
    assert (code, line) == (
        5,
        f"rheostat: vLLM could not start with the model {model}: Error while deserializing header: "
        "incomplete metadata, file not fully covered",
    )


def test_a_staging_area_that_does_not_fit_into_the_memory_is_refused(tmp_path: Path) -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    code, line = ended(tmp_path, "demo", "--staging-mib", str(installed))
    assert code == 2
    assert line.startswith("rheostat: the worker takes ")
    assert f"(--staging-mib {installed}, --capture-mib 512, --bank-mib 256), but only " in line
    assert " MiB are available. Lower --staging-mib to " in line


def test_a_policy_for_a_larger_model_ends_the_start(tmp_path: Path) -> None:
    steer = {"sites": {"points": ["POINT_RESID_POST"], "list": {"layers": [99]}}}
    steer["scale"] = {"read": {"vector": {"tokenDirection": {"tokenId": 5}}}, "factor": 0}
    path = tmp_path / "policy.json"
    policy = {"steering": {"interventions": [steer]}}
    path.write_text(json.dumps({"policy": policy, "version": 1}))
    code, line = ended(tmp_path, "demo", "--policy", str(path))
    assert (code, line) == (
        11,
        f"rheostat: --policy {path}: policy.steering.interventions[0].sites.list.layers[0]: layer "
        "99 is not one of the model's layers 0 to 5. Correct the file",
    )
