"""What the server tells the workers arrives, and what vLLM is told to load exists."""

import ast
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

from rheostat_engine import EngineSettings, engine_kwargs

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


def test_the_compile_cache_tells_apart_what_is_compiled_and_nothing_else() -> None:
    elsewhere = EngineSettings("ipc:///tmp/two", bank_bytes=1000, capture_bytes=2000, slots=3)
    assert elsewhere.compute_hash() == SETTINGS.compute_hash()
    others = [
        EngineSettings("", bank_bytes=1001, capture_bytes=2000, slots=3),
        EngineSettings("", bank_bytes=1000, capture_bytes=2001, slots=3),
        EngineSettings("", bank_bytes=1000, capture_bytes=2000, slots=4),
    ]
    assert len({one.compute_hash() for one in [SETTINGS, *others]}) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_worker_that_vllm_is_told_to_load_exists(device: Literal["cpu", "cuda"]) -> None:
    path = engine_kwargs(SETTINGS, device=device)["worker_cls"]
    assert isinstance(path, str)
    module, name = path.rsplit(".", 1)
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
