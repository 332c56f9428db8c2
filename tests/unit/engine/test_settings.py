"""What the server tells the workers arrives, and what vLLM is told to load exists."""

import ast
import pickle
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from rheostat_engine import Capacity, EngineSettings, engine_kwargs, settings

SETTINGS = EngineSettings("ipc:///tmp/one", bank_bytes=1000, capture_bytes=2000, slots=3)


def test_settings_reach_the_worker_as_they_were_made() -> None:
    config = engine_kwargs(SETTINGS, device="cpu")["additional_config"]
    assert EngineSettings.from_config(pickle.loads(pickle.dumps(config))) == SETTINGS


@pytest.mark.parametrize("config", [None, {}, {"rheostat": {"channel": "ipc:///tmp/one"}}])
def test_a_worker_without_settings_is_told_how_to_get_them(config: object) -> None:
    message = (
        "^additional_config holds no rheostat settings; build the engine's arguments with "
        "rheostat_engine.engine_kwargs$"
    )
    with pytest.raises(ValueError, match=message):
        EngineSettings.from_config(config)


def test_other_settings_compile_nothing_anew() -> None:
    others = [
        replace(SETTINGS, channel="ipc:///tmp/two"),
        replace(SETTINGS, bank_bytes=1001),
        replace(SETTINGS, capture_bytes=2001),
        replace(SETTINGS, slots=4),
        replace(SETTINGS, steps=5),
        replace(SETTINGS, token_rules=5),
    ]
    assert {one.compute_hash() for one in others} == {SETTINGS.compute_hash()}


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        ("sites/install.py", True),
        ("sites/new.py", True),
        ("plan/points.py", True),
        ("adapters/assembly.py", True),
        ("worker/runtime.py", False),
    ],
)
def test_a_version_with_other_sites_never_gets_the_compiled_code_of_this_one(
    tmp_path: Path, module: str, counts: bool
) -> None:
    package = Path(settings.__file__).parent
    other = tmp_path / "rheostat_engine"
    shutil.copytree(package, other, ignore=shutil.ignore_patterns("__pycache__"))
    assert settings.source_digest(other) == settings.source_digest(package)
    assert settings.source_digest(package) in SETTINGS.compute_hash()
    settings.source_digest.cache_clear()
    with (other / module).open("a") as file:
        file.write("CHANGED = True\n")
    assert (settings.source_digest(other) != settings.source_digest(package)) == counts


def test_memory_is_shared_out_among_rows_directions_and_the_ring() -> None:
    settings = EngineSettings(
        "", bank_bytes=64_000, capture_bytes=20_000, slots=7, steps=9, token_rules=3
    )
    room = settings.capacity(width=100, itemsize=2)
    assert room == Capacity(
        bank_rows=48_000 // 200 - 1,
        directions=16_000 // 400 - 1,
        steps=9,
        slots=6,
        token_rules=3,
        capture_rows=20_000 // 200 - 1,
        row_sums=4096,
    )
    assert settings.capacity(width=4096, itemsize=2).row_sums == (32 << 20) // (8 * 4097)


def test_there_is_room_for_one_of_everything_however_little_memory_is_given() -> None:
    room = EngineSettings("", bank_bytes=1, capture_bytes=1).capacity(width=4096, itemsize=2)
    assert (room.bank_rows, room.directions, room.capture_rows) == (1, 1, 1)


def test_the_scheduler_that_vllm_is_told_to_load_exists() -> None:
    path = engine_kwargs(SETTINGS, device="cpu")["scheduler_cls"]
    assert named_in_its_module(path, ast.FunctionDef)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_worker_that_vllm_is_told_to_load_exists(device: Literal["cpu", "cuda"]) -> None:
    path = engine_kwargs(SETTINGS, device=device)["worker_cls"]
    assert named_in_its_module(path, ast.ClassDef)


def named_in_its_module(path: object, kind: type[ast.ClassDef] | type[ast.FunctionDef]) -> bool:
    """Whether a module, which may not be importable here, defines what a path ends in."""
    assert isinstance(path, str)
    module, name = path.rsplit(".", 1)
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    return name in {node.name for node in tree.body if isinstance(node, kind)}
