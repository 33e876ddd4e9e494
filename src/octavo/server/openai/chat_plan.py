"""From a chat request to everything that is settled before it runs. Whatever is wrong with it is found here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.sampling_params import RequestPriority
from octavo.server.errors import bad_request
from octavo.server.openai.answer_formats import AnswerFormats
from octavo.server.openai.answer_plan import AnswerPlan, AnswerReader
from octavo.server.openai.chunks import ReplyHead
from octavo.server.openai.history import template_messages
from octavo.server.openai.logprobs import ChatRows, TokenNames
from octavo.server.openai.params import chat_params
from octavo.server.openai.prompts import truncated
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage, ContentPart, TokenizeRequest
from octavo.server.openai.wishes import Wishes
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPlan:
    """One chat request, correct and ready to run."""

    head: ReplyHead
    prompt: ProcessedRequest
    wishes: Wishes
    make_reader: Callable[[], AnswerReader]  # one for each answer
    make_rows: Callable[[], ChatRows] | None  # the same; None: no logprobs
    shows_reasoning: bool


def plan_chat(request: ChatCompletionRequest, head: ReplyHead, front: EngineFront, formats: AnswerFormats) -> ChatPlan:
    """Render, tokenise and validate. May take a while for long conversations.

    Raises:
        ApiError, UserError: naming what is wrong.
    """
    _refuse_unsupported(request)
    wishes = Wishes.of(request)
    answers = AnswerPlan.of(request, chat_params(request, front.inputs.default_params), formats)
    options = {**answers.prompt_options, **prompt_end(request)}
    if request.documents is not None:
        options["documents"] = request.documents
    whole = front.inputs.chat_prompt(conversation(request.messages, front.tokenizer), **options)
    tokens = truncated(whole, request.truncate_prompt_tokens)
    answers = answers.after(tokens["prompt_token_ids"])
    prompt = front.process(
        tokens,
        answers.params,
        priority=RequestPriority.NORMAL if request.priority is None else request.priority,
        cache_salt=request.cache_salt,
    )
    names = TokenNames(front.tokenizer, as_ids=wishes.names_tokens_by_id)
    rows = partial(ChatRows, names, request.top_logprobs or 0, skips_special_tokens=answers.params.skip_special_tokens)
    return ChatPlan(
        head=head,
        prompt=prompt,
        wishes=wishes,
        make_reader=answers.reader,
        make_rows=rows if request.logprobs else None,
        shows_reasoning=answers.shows_reasoning,
    )


def prompt_end(request: ChatCompletionRequest | TokenizeRequest) -> dict[str, object]:
    """Return how the chat template is to end the prompt.

    Raises:
        ApiError: 400; both ways at once.
    """
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request("Only one of 'add_generation_prompt' and 'continue_final_message'.", "continue_final_message")
    return {
        "continue_final_message": bool(request.continue_final_message),
        "add_generation_prompt": request.add_generation_prompt is not False,
    }


def conversation(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> list[dict[str, object]]:
    """Return messages as the model's chat template reads them; one that knows no `developer` gets `system`.

    Raises:
        ApiError: 400; a part of a message that is not text.
    """
    template = tokenizer.chat_template
    knows_developer = template is not None and "developer" in template.source
    sound = [
        msgspec.structs.replace(
            message,
            role="system" if message.role == "developer" and not knows_developer else message.role,
            content=_text_of(message.content, f"messages[{index}].content"),
        )
        for index, message in enumerate(messages)
    ]
    return template_messages(sound)


def _text_of(content: str | list[ContentPart] | None, path: str) -> str | None:
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            text = f"This model reads text only, not '{part.type}'."
            raise bad_request(text, f"{path}[{index}].type", "unsupported_content")
        if (part.text or part.refusal) is None:
            missing = f"{path}[{index}].{part.type}"
            raise bad_request(f"Missing required parameter: '{missing}'.", missing, "missing_required_parameter")
    return "".join(part.text or part.refusal or "" for part in content)


def _refuse_unsupported(request: ChatCompletionRequest) -> None:
    if request.add_special_tokens:
        text = "The chat template writes all special tokens; none can be added."
        raise bad_request(text, "add_special_tokens", "unsupported_parameter")
    if request.chat_template is not None:  # a program, and this one would come from a stranger
        raise bad_request("Templates in requests are refused.", "chat_template", "unsupported_parameter")
