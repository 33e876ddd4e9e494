"""The prompt of a conversation: one rendering for chats and for `/tokenize`, and the answer that it may have begun."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from octavo.engine.front import EngineFront
from octavo.inputs import TokensPrompt
from octavo.multimodal.prompt import MultiModalPrompt
from octavo.server.errors import bad_request
from octavo.server.openai.content_parts import MediaReader, truncated_chat
from octavo.server.openai.messages import prompt_end, template_messages
from octavo.server.openai.params import Warn
from octavo.server.openai.parsers.reasoning import ReasoningFormat
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest
from octavo.tokenizer.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_NUM_TAIL_TOKENS = 16  # enough of a prompt to see whether it ends in a message
_NUM_TAIL_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunAnswer:
    """The beginning of an answer, which ends the prompt: the model goes on with it."""

    content: str
    reasoning: str

    @classmethod
    def of(cls, request: ChatCompletionRequest, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> Self | None:
        """Return the last message if the rendered prompt ends in it: by request, or as its template ends no message."""
        last = request.messages[-1]
        if last.role != "assistant":
            return None
        begun = cls(content=_text_of(last), reasoning=last.reasoning_content or last.reasoning or "")
        if request.continue_final_message:
            return begun
        if request.add_generation_prompt is not False:
            return None
        tail = tokenizer.decode(prompt_token_ids[-_NUM_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        end = (begun.content or begun.reasoning).rstrip()[-_NUM_TAIL_CHARACTERS:]
        return begun if end and tail.endswith(end) else None


def render_chat(
    request: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    options: Mapping[str, object],
    front: EngineFront,
    reasoning: ReasoningFormat | None,
    media: MediaReader | None,
    warn: Warn,
) -> TokensPrompt | MultiModalPrompt:
    """Return the prompt for `messages`; `options` are those of `prompt_options`.

    Raises:
        ApiError, UserError: names the problem.
    """
    options = {**options, **prompt_end(request)}
    if request.documents is not None:
        options["documents"] = request.documents
    plain = template_messages(messages, front.tokenizer, warn, media)
    if request.continue_final_message and plain:
        plain[-1] = _with_open_thought(plain[-1], front.tokenizer, reasoning)
    has_to_fit = isinstance(request, ChatCompletionRequest) and request.truncate_prompt_tokens is None
    prompt = front.inputs.chat_prompt(plain, has_to_fit, **options)
    return truncated_chat(prompt, request.truncate_prompt_tokens)


def prompt_options(
    request: ChatCompletionRequest | TokenizeRequest, prompt_tools: Sequence[Mapping[str, object]] | None
) -> dict[str, object]:
    """Return the chat template's variables other than the messages. The client's own take precedence.

    Raises:
        ApiError: 400, names the field.
    """
    options: dict[str, object] = {} if prompt_tools is None else {"tools": prompt_tools}
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
        options |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in _OWN_VARIABLES:
            raise bad_request(f"'{name}' is a separate field.", f"chat_template_kwargs.{name}")
        options[name] = value
    return options


def _with_open_thought(
    message: dict[str, object], tokenizer: Tokenizer, reasoning: ReasoningFormat | None
) -> dict[str, object]:
    """Write a thought without an answer into the text if the template does not know it as a field."""
    thought, template = message.get("reasoning_content"), tokenizer.chat_template
    if not thought or message.get("content") or reasoning is None or template is None:
        return message
    if "reasoning_content" in template.source:
        return message
    return {**message, "content": f"{reasoning.begin}\n{thought}"}


def _text_of(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""
