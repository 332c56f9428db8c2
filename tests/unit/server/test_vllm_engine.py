"""What a user is told when vLLM doesn't come up."""

from rheostat_server.vllm_engine import what_happened


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
