"""When a request is done, as far as tokens can tell. Stop strings are the front's business: text exists only there."""

from msgspec.structs import replace

from octavo.contracts.engine import FinishedRequest
from octavo.scheduler.request import Request, RequestStatus


def check_stop(request: Request, token_id: int, num_tokens: int) -> FinishedRequest | None:
    """Decide whether `token_id`, now the last of `num_tokens` known tokens, ends the request.

    A stop token wins over the length cap when both hold. `stop_token_id` is reported only for an id that the request
    itself named, as clients expect.
    """
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if token_id in request.stop_token_ids and num_output_tokens > request.params.min_tokens:
        named = None if token_id in request.active_eos_token_ids else token_id
        return finished(request, RequestStatus.STOPPED, stop_token_id=named)
    if num_tokens >= request.max_num_tokens:
        return finished(request, RequestStatus.LENGTH_CAPPED)
    return None


def grammar_complete(request: Request) -> FinishedRequest:
    """Report an answer whose form is complete: it has ended, though no end token said so."""
    return replace(finished(request, RequestStatus.STOPPED), shows_last_token=True)


def finished(
    request: Request,
    status: RequestStatus,
    *,
    stop_token_id: int | None = None,
    error: str | None = None,
    error_type: str | None = None,
) -> FinishedRequest:
    """Report a final status."""
    return FinishedRequest(
        finish_reason=status.value,
        stop_token_id=stop_token_id,
        error=error,
        num_preemptions=request.num_preemptions,
        error_type=error_type,
    )
