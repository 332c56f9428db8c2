"""How much may run and wait at once, whatever the requests ask for."""

from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.errors import QueueFull
from rheostat_server.limits import QUEUED_PROMPT_TOKENS, RETRY_SECONDS, WAITING_REQUESTS


def check_queue(
    admitted: AdmittedRequest, running_samples: int, *, samples: int, prompt_tokens: int
) -> None:
    """Checks that one more request may run or wait.

    Args:
        admitted: the request.
        running_samples: samples that the engine runs at once.
        samples: samples of the other requests.
        prompt_tokens: prompt tokens of the other requests, with one prompt for each sample.

    Raises:
        QueueFull: too many requests run or wait.
    """
    if samples >= running_samples + WAITING_REQUESTS:
        raise QueueFull(
            f"{samples} samples run or wait already; try again later", retry_after=RETRY_SECONDS
        )
    own = admitted.prompt_len * admitted.sampling.samples
    if samples and prompt_tokens + own > QUEUED_PROMPT_TOKENS:
        raise QueueFull(
            f"the prompts that run or wait have {prompt_tokens} tokens, with one prompt for each "
            f"sample; at most {QUEUED_PROMPT_TOKENS} are allowed",
            retry_after=RETRY_SECONDS,
        )
