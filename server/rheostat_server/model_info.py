"""The model that a server has loaded, and how it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model and how it runs."""

    name: str
    """Name under which it was loaded."""
    vocabulary: int
    """Number of token ids."""
    model_tokens: int
    """Tokens of prompt and generation together."""
    step_tokens: int
    """The most tokens that one step computes."""
    running_samples: int
    """Samples that run at once; more wait."""
    logprobs: int
    """Most log-probabilities per token."""
    device: str
    """"cpu" or "cuda"."""
    compiled: bool
    """Whether the model is compiled."""
    prefix_caching: bool
    """Whether prefix caching is on."""
    loras: tuple[str, ...]
    """Names of its adapters."""
    tensor_parallel: int
    """Tensor-parallel ranks."""
    pipeline_parallel: int
    """Pipeline-parallel stages."""
    vllm_version: str
    """Version of vLLM."""
    torch_version: str
    """Version of torch."""
    head_loras: tuple[str, ...] = ()
    """Names of the adapters that change the unembedding."""

    @property
    def no_gates(self) -> str:
        """Why probes and gates are not served; empty if they are."""
        if self.pipeline_parallel > 1:
            return (
                "probes and gates are not served with pipeline parallelism, because a gate would "
                "need what another stage reads"
            )
        return ""
