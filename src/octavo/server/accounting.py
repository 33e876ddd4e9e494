"""What a decoded request and its reply mean to operators: how many samples, which deadline, how many tokens."""

import msgspec

from octavo.errors import InvalidParameterError
from octavo.server.args import ServerArgs
from octavo.server.errors import as_api_error
from octavo.server.exchange import Exchange
from octavo.server.openai.protocol import CompletionRequest, GenerationRequest
from octavo.server.openai.replies import ChatCompletion, Completion
from octavo.server.sse import FrameSource


def note_request(exchange: Exchange, wire: object, args: ServerArgs) -> None:
    """Let a request count for its samples, and apply the deadline that it brings.

    Raises:
        ApiError: a deadline that is no time.
    """
    if isinstance(wire, GenerationRequest):
        if wire.timeout is not None:
            try:
                exchange.limit_to(wire.timeout)
            except InvalidParameterError as error:
                raise as_api_error(error) from None
        if exchange.ticket is not None:
            exchange.ticket.resize(num_samples(wire, args))


def note_reply(exchange: Exchange, reply: msgspec.Struct | FrameSource) -> None:
    """Let the access log know the tokens: now, or those of a stream when it is over."""
    if isinstance(reply, ChatCompletion | Completion):
        usage = reply.usage
        exchange.count_tokens = lambda: (usage.prompt_tokens, usage.completion_tokens)
    elif not isinstance(reply, msgspec.Struct):
        exchange.count_tokens = reply.count_tokens


def num_samples(wire: GenerationRequest, args: ServerArgs) -> int:
    """Return how many samples a request asks for; what is beyond the limits will be refused, and does not count."""
    prompt = wire.prompt if isinstance(wire, CompletionRequest) else ""
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    num_prompts = min(len(prompt), args.max_prompts) if is_batch else 1
    return num_prompts * min(max(wire.n or 1, 1), args.max_n)
