"""When a request ends because of its tokens. Stop strings are handled by the frontend: text exists only there."""

from msgspec.structs import replace

from octavo.contracts.engine import FinishedRequest
from octavo.scheduler.request import Request, RequestStatus


def check_stop(request: Request, token_id: int, num_tokens: int) -> FinishedRequest | None:
    """Decide whether `token_id`, now the last of `num_tokens` known tokens, ends the request.

    A stop token takes precedence over the length limit. `stop_token_id` is only reported for ids in the request's own
    `stop_token_ids`, as clients expect.
    """
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if token_id in request.stop_token_ids and num_output_tokens > request.params.min_tokens:
        named = None if token_id in request.active_eos_token_ids else token_id
        return finished(request, RequestStatus.STOPPED, stop_token_id=named)
    if num_tokens >= request.max_num_tokens:
        return finished(request, RequestStatus.LENGTH_CAPPED)
    return None


def grammar_complete(request: Request) -> FinishedRequest:
    """Report an output that satisfies its constraint: it has stopped, though without a stop token."""
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
        num_drafts=request.num_drafts,
        num_accepted_drafts=request.num_accepted_drafts,
        error_type=error_type,
    )
