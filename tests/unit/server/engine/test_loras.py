"""Adapters: read from their folders at the start, named by requests."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rheostat_server.engine.loras import Lora, lora_arguments, read_loras
from rheostat_server.errors import InvalidConfig, ModelNotFound


def adapter(folder: Path, rank: object) -> str:
    folder.mkdir()
    save_file({}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    return str(folder)


def test_adapters_are_numbered_in_order_and_their_widest_rank_is_served(tmp_path: Path) -> None:
    a, b = adapter(tmp_path / "a", 4), adapter(tmp_path / "b", 24)
    loras = read_loras([("one", a), ("two", b)])
    assert loras == (Lora("one", 1, a, 4), Lora("two", 2, b, 24))
    assert lora_arguments(loras, cpu=False) == {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 32,
    }


def test_on_a_cpu_one_slot_stays_empty_for_tokens_without_an_adapter(tmp_path: Path) -> None:
    loras = read_loras([("one", adapter(tmp_path / "a", 8))])
    assert lora_arguments(loras, cpu=True)["max_loras"] == 2


def test_without_adapters_vllm_is_told_nothing() -> None:
    assert lora_arguments((), cpu=True) == {}


@pytest.mark.parametrize("rank", [None, 0, -1, 1.5, "8", 100_000])
def test_an_adapter_without_a_rank_that_vllm_serves_stops_the_start(
    tmp_path: Path, rank: object
) -> None:
    with pytest.raises(ModelNotFound, match="the adapter odd"):
        read_loras([("odd", adapter(tmp_path / "a", rank))])


def test_a_folder_without_an_adapter_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no adapter_config\.json"):
        read_loras([("none", str(tmp_path))])


def test_an_adapter_without_weights_stops_the_start(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 8)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"the adapter odd: .* holds none of adapter_model"):
        read_loras([("odd", folder)])
    (tmp_path / "a" / "adapter_model.bin").touch()  # what is in it, only vLLM finds out
    assert read_loras([("odd", folder)])


def test_an_adapter_whose_weights_are_cut_off_stops_the_start(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 8)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    save_file({"x": np.zeros(100, np.float32)}, weights)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelNotFound, match=r"the adapter odd: cannot read .*\.safetensors: "):
        read_loras([("odd", folder)])


def test_adapters_of_the_unembedding_are_marked(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 8)
    (one,) = read_loras([("one", folder)])
    assert not one.changes_head
    weights = {"base_model.model.lm_head.lora_A.weight": np.zeros((8, 4), np.float32)}
    save_file(weights, tmp_path / "a" / "adapter_model.safetensors")
    (one,) = read_loras([("one", folder)])
    assert one.changes_head


def test_the_config_marks_an_adapter_whose_weights_only_vllm_reads(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 8)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    (tmp_path / "a" / "adapter_model.bin").touch()
    config = {"r": 8, "target_modules": ["q_proj", "lm_head"]}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    (one,) = read_loras([("one", folder)])
    assert one.changes_head


def test_a_name_that_comes_twice_stops_the_start(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", 8)
    with pytest.raises(InvalidConfig, match="two adapters are named twin"):
        read_loras([("twin", folder), ("twin", folder)])
