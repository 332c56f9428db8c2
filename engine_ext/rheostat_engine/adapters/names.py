"""The server's names of requests, in vLLM's ids of them.

vLLM's front end adds a hyphen and random letters to the id that it is given, unless it is told not
to, so that two requests with one id stay apart.
"""

from vllm import envs


def name_of(request_id: str) -> str:
    """The name under which the server knows the request that vLLM calls `request_id`."""
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return request_id
    return request_id.rpartition("-")[0]
