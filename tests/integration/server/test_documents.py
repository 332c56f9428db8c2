"""Every code block of the pages, and every example, on a real server."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rheostat
from rheostat._cli import main

from ...documents import PAGES, ROOT, Page, blocks_of
from .conftest import Server

pytestmark = pytest.mark.integration


@pytest.fixture
def environment(server: Server) -> dict[str, str]:
    """What commands of the pages see: this Python's commands, and the server."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "RHEOSTAT_TARGET": server.target}


@pytest.fixture
def tidy(engine: rheostat.Engine) -> Iterator[None]:
    """Afterwards no name, run or server-wide steering is left that was not there before."""
    names = {info.vector.name for info in engine.vectors.list()}
    yield
    engine.steering.set_global(None)
    for run in engine.runs():
        engine.delete_run(run.id)
    for info in engine.vectors.list():
        if info.vector.name and info.vector.name not in names:
            engine.vectors.delete(info.vector.name)


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_do_what_they_say(
    server: Server, sink_root: Path, environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    replaced = {"localhost:50051": server.target}
    replaced |= dict.fromkeys(("/data/captures", "/tmp/captures"), str(sink_root))
    page = Page(tmp_path, replaced, environment)
    try:
        for block in blocks_of(name, (ROOT / name).read_text(encoding="utf-8")):
            page.run(block)
    finally:
        page.close()


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("tidy")
def test_the_dose_response_example_draws_its_picture(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = example("dose_response")
    for constant, value in (("DOSES", (-0.35, 0.0, 0.35)), ("SAMPLES", 2)):
        monkeypatch.setattr(module, constant, value)
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(
        sys, "argv", ["dose_response.py", "--target", server.target, "--out", str(picture)]
    )
    module.main()
    assert "joyful share / facts right" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000


def test_the_live_probe_example_reads_the_tone(
    server: Server, sink_root: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / "examples" / "live_probe.py")]
    picture = tmp_path / "picture.png"
    done = subprocess.run(
        [*command, "--target", server.target, "--root", str(sink_root), "--out", str(picture)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "watching layer" in done.stdout
    happy = [line for line in done.stdout.splitlines() if line.startswith("happy-")]
    assert any("+" in line for line in happy)
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("tidy")
def test_the_tone_guard_steers_back_only_what_turns_gloomy(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = example("tone_guard")
    monkeypatch.setattr(module, "NEUTRAL", module.NEUTRAL[:12])
    for constant, value in (("SAMPLES", 2), ("AT_ONCE", 16), ("SHOWN", 3)):
        monkeypatch.setattr(module, constant, value)
    picture, numbers = tmp_path / "picture.png", tmp_path / "numbers.json"
    command = ["tone_guard.py", "--target", server.target, "--out", str(picture)]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(numbers)])
    module.main()
    found = json.loads(numbers.read_text())
    assert found["unchanged"] == found["of"]  # no bit of a cheerful text or a fact
    arms = found["arms"]
    without, guarded, stopped = (arms[name] for name in ("without", "guarded", "stopped"))
    assert without["gloomy_later"] > 0.95 * without["tonal_later"] > 10
    assert guarded["gloomy_later"] < 0.15 * guarded["tonal_later"]
    assert without["cued_gloomy"] > 0.95 * without["cued_tonal"]
    assert guarded["cued_gloomy"] < 0.3 * guarded["cued_tonal"]
    assert stopped["gloomy_later"] < 0.3 * without["gloomy_later"]
    assert stopped["stopped"] > 0
    assert arms["the vector at every token"]["facts"] < guarded["facts"] == found["facts"]
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("tidy")
def test_the_controller_holds_its_set_points(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = example("hold_set_point")
    picture, numbers = tmp_path / "picture.png", tmp_path / "numbers.json"
    command = ["hold_set_point.py", "--target", server.target, "--out", str(picture)]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(numbers)])
    module.main()
    found = json.loads(numbers.read_text())
    free = found.pop("no controller")["mean"]
    for name, row in found.items():
        # Far from the mean without a controller. On a busy machine gains come late.
        assert abs(row["mean"] - float(name)) < 1.2
        assert row["gains"] > 200
    assert abs(free) < 2
    assert picture.stat().st_size > 10_000


@pytest.mark.usefixtures("tidy")
def test_the_demo_draws_its_picture_on_a_server_that_runs(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "demo.png"
    assert main(["demo", "--target", server.target, "--out", str(picture)]) == 0
    assert "The fact that makes it Paris is carried by" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
