"""Looks up the tokenizer's end token once, not for each request.

Why
    vLLM asks its renderer for the end token when it processes a request. The tokenizer converts the
    token's text each time, on a thread pool's lock: 20 microseconds of the event loop.
"""

from vllm.v1.engine.async_llm import AsyncLLM


def keep_end_token(llm: AsyncLLM) -> None:
    """Makes the renderer of an engine return the end token that it has now."""
    token = llm.renderer.get_eos_token_id()
    llm.renderer.get_eos_token_id = lambda: token
