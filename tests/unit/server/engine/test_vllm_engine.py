"""What vLLM is told to take, and what a user is told when it doesn't come up."""

import logging
import os

import pytest

from rheostat_server.config import ServerConfig
from rheostat_server.engine.vllm_engine import cpu_memory, what_happened

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def test_a_size_that_was_given_holds_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = ServerConfig(model="toy", port=0, kv_cache_memory_bytes=1 << 20)
    monkeypatch.setenv(VARIABLE, "1")
    with caplog.at_level(logging.WARNING):
        assert cpu_memory(given) == {}
    assert VARIABLE not in os.environ
    assert VARIABLE in caplog.text


def test_the_environment_decides_where_nothing_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    open_end = ServerConfig(model="toy", port=0)
    monkeypatch.setenv(VARIABLE, "1")
    assert (cpu_memory(open_end), os.environ[VARIABLE]) == ({}, "1")
    monkeypatch.delenv(VARIABLE)
    assert 0 < cpu_memory(open_end)["kv_cache_memory_bytes"] <= 4 << 30


def test_a_validation_error_is_told_by_what_is_wrong_not_by_its_count() -> None:
    error = ValueError(
        "1 validation error for ModelConfig\n"
        "  Value error, max_model_len (999999) is greater than 2048 [type=value_error]\n"
        "    For further information visit https://errors.pydantic.dev"
    )
    assert what_happened(error).startswith(
        "Value error, max_model_len (999999) is greater than 2048"
    )


def test_other_errors_are_told_by_their_first_line_or_their_kind() -> None:
    assert what_happened(RuntimeError("no memory\nat all")) == "no memory"
    assert what_happened(KeyError()) == "KeyError"
