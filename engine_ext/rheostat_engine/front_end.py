"""What the process that holds an `AsyncLLM` does before it makes one."""


def prepare_front_end() -> None:
    """Keeps vLLM from decoding log-probabilities on the event loop; see `adapters.logprobs`."""
    from rheostat_engine.adapters.logprobs import leave_logprobs_undecoded

    leave_logprobs_undecoded()
