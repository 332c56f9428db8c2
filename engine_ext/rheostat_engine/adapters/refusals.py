"""Refuses configurations of vLLM that move rows or load KV in ways that sites don't support.

Invariant: such a configuration fails at startup, with an error that names the setting and a remedy.
It never runs with sites that select the wrong tokens.
"""

from vllm.config import VllmConfig

from rheostat_engine.sites.block_layout import SiteError


def refuse_unserved(config: VllmConfig) -> None:
    """Checks an engine's configuration.

    Raises:
        SiteError: a setting is not supported; the message names it and the remedy.
    """
    model, parallel = config.model_config, config.parallel_config
    reasons = {
        "speculative decoding: serve without speculative_config": config.speculative_config
        is not None,
        "pooling models: serve a generative model": model.runner_type != "generate",
        "encoder-decoder models: serve a decoder-only model": model.is_encoder_decoder,
        "dual-batch overlap: serve with enable_dbo=False": bool(parallel.use_ubatching),
        "data parallelism: start one server for each replica": parallel.data_parallel_size > 1,
        "prefill context parallelism: serve with prefill_context_parallel_size=1": (
            parallel.prefill_context_parallel_size > 1
        ),
        "fast prefill over shared KV: serve with kv_sharing_fast_prefill=False": (
            config.cache_config.kv_sharing_fast_prefill
        ),
        "KV connectors: serve without kv_transfer_config": config.kv_transfer_config is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise SiteError(f"rheostat does not serve {reason}")
