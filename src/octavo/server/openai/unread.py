"""Finds the parts of a chat request that are meant for the chat template and that it does not read."""

from collections.abc import Iterator

from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.tokenizer.chat_template import ChatTemplate

_EFFORT = ("reasoning_effort", "enable_thinking")  # the variables that the field sets
_WHY = "the model's chat template does not read it"
_MAX_SHOWN = 40  # characters of a name
_MAX_NAMED = 8  # variables


def unread_parts(request: ChatCompletionRequest, template: ChatTemplate, *, has_tools: bool) -> Iterator[str]:
    """Yield a warning for each; `has_tools`: tools may be called."""

    def is_read(name: str) -> bool:
        return template.reads(name, with_tools=has_tools)

    if has_tools and not is_read("tools"):
        yield "the prompt does not show the tools: the model's chat template has no place for them"
    if request.reasoning_effort is not None and not any(map(is_read, _EFFORT)):
        yield f"reasoning_effort does not change the prompt: {_WHY}"
    if request.documents is not None and not is_read("documents"):
        yield f"documents have no effect: {_WHY}"
    unread = [name for name in request.chat_template_kwargs or {} if not is_read(name)]
    for name in unread[:_MAX_NAMED]:
        yield f"chat_template_kwargs.{name[:_MAX_SHOWN]!r} does not change the prompt: {_WHY}"
    if len(unread) > _MAX_NAMED:
        yield f"{len(unread) - _MAX_NAMED} more of chat_template_kwargs do not change the prompt"
