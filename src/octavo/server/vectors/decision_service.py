"""`DecisionsService`: typed questions over HTTP, in two forms, on the engine's pooled requests."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.engine.decision_questions import Decision, DecisionFiles, Question, as_text, make_question, parse_questions
from octavo.engine.decisions import Decisions, read_decision_files
from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import InvalidParameterError, UserError
from octavo.outputs import RequestOutput
from octavo.server.http.errors import ApiError, as_api_error, bad_request
from octavo.server.openai.embeddings import VectorsRequest, answers_to, numbers_of
from octavo.server.openai.media import MediaReader
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import Warn
from octavo.server.openai.service import OpenAICompatibleService, prepared
from octavo.server.openai.token_usage import ResponseUsage, WrittenTokensDetails
from octavo.server.vectors.decision_media import pictures_of, read_assets, seen_content
from octavo.server.vectors.decision_protocol import (
    MAX_NAMED_QUESTIONS,
    MAX_QUESTIONS,
    MIN_CHOICES,
    AnyQuestion,
    ChoiceAnswer,
    ChoiceQuestion,
    ChoiceShare,
    DecisionsReply,
    DecisionsRequest,
    LevelShare,
    PredicateAnswer,
    PredicateQuestion,
    ScoreAnswer,
    SystemOneReply,
    SystemOneRequest,
    SystemOneUsage,
)

_TEXT_PARTS = ("text", "input_text", "output_text")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
Prepared = tuple[Decisions, list[ProcessedRequest]]


class DecisionsService:
    """Its methods are as those of `OpenAICompatibleService`."""

    def __init__(self, service: OpenAICompatibleService) -> None:
        self._service = service

    async def decisions(self, request: DecisionsRequest, warn: Warn, is_large: bool) -> DecisionsReply:
        """Answer a list of questions about a text or a conversation."""
        model, count = self._service.models.find(request.model), len(request.questions)
        if not 1 <= count <= MAX_QUESTIONS:
            raise bad_request(f"{count} questions: 1 to {MAX_QUESTIONS} per request.", "questions")
        if not request.input:
            raise bad_request("'input' must not be empty.", "input")
        if request.prompt_cache_options is not None:
            warn("prompt_cache_options has no effect: prefixes are cached by themselves")
        media = None
        if not isinstance(request.input, str):
            media = await self._service.media([pictures_of(item) for item in request.input], "input")
        work = partial(_prepare_decisions, request, model, media)
        decisions, prompts = await prepared(work, request, True)
        outputs = await _answers(prompts, model)
        cached = decisions.num_cached(outputs)
        answers = zip(request.questions, decisions.answers(outputs), strict=True)
        return DecisionsReply(
            model=model.card.id,
            answers=[_answer(question, answer) for question, answer in answers],
            usage=ResponseUsage(
                input_tokens=decisions.num_tokens,
                input_tokens_details=WrittenTokensDetails(cached_tokens=cached),
                total_tokens=decisions.num_tokens,
            ),
        )

    async def system_one(self, request: SystemOneRequest, warn: Warn, is_large: bool) -> SystemOneReply:
        """Answer questions about a state, by their names."""
        model, count = self._service.models.find(request.model), len(request.questions)
        if not 1 <= count <= MAX_NAMED_QUESTIONS:
            raise bad_request(f"{count} questions: 1 to {MAX_NAMED_QUESTIONS} per request.", "questions")
        media = await self._service.media(())
        decisions, prompts = await prepared(partial(_prepare_system_one, request, model, media), request, True)
        answers = decisions.answers(await _answers(prompts, model))
        return SystemOneReply(
            model=model.card.id,
            answers={answer.question.name: answer.as_dict for answer in answers},
            usage=SystemOneUsage(input_tokens=decisions.num_tokens),
        )


def _prepare_system_one(request: SystemOneRequest, model: ServedModel, media: MediaReader | None) -> Prepared:
    files = read_decision_files(model.engine.front)
    try:
        questions = parse_questions(request.questions, files)
    except InvalidParameterError as error:
        raise bad_request(error.limit, error.field) from error
    images = read_assets(request.assets or {}, media)
    return _prepare(Decisions(model.engine.front, request.state, questions, files, images=images), request, model)


def _prepare_decisions(request: DecisionsRequest, model: ServedModel, media: MediaReader | None) -> Prepared:
    files = read_decision_files(model.engine.front)
    questions = [_question(index, question, files) for index, question in enumerate(request.questions)]
    if isinstance(request.input, str):
        return _prepare(Decisions(model.engine.front, request.input, questions, files), request, model)
    messages = _messages(request.input, media)
    return _prepare(Decisions(model.engine.front, None, questions, files, messages), request, model)


def _prepare(decisions: Decisions, request: VectorsRequest, model: ServedModel) -> Prepared:
    try:
        pairs = zip(decisions.prompts, decisions.params, strict=True)
        return decisions, [model.process(prompt, params, **request.options) for prompt, params in pairs]
    except UserError as error:
        raise as_api_error(error, {"prompt": "input", "prompt_token_ids": "input"}) from error


async def _answers(prompts: Sequence[ProcessedRequest], model: ServedModel) -> list[RequestOutput]:
    outputs = await answers_to(prompts, model)
    for output in outputs:
        numbers_of(output)  # raises what went wrong in the API's shape
    return outputs


def _question(index: int, question: AnyQuestion, files: DecisionFiles) -> Question:
    place, asked = f"questions[{index}]", _text(question.instructions, f"questions[{index}].instructions")
    if isinstance(question, PredicateQuestion):
        nothing = [None] * len(files.noul_options)
        return make_question(place, "noul", asked, files.noul_options, nothing, files)
    if isinstance(question, ChoiceQuestion):
        values = [choice.value for choice in question.choices]
        if len(values) < MIN_CHOICES or len({(type(value), value) for value in values}) < len(values):
            raise bad_request(f"'{place}.choices': at least {MIN_CHOICES}, each once.", f"{place}.choices")
        options = [value if isinstance(value, str) else as_text(value) for value in values]
        descriptions = [choice.description for choice in question.choices]
        return make_question(place, "choice", asked, options, descriptions, files)
    levels = [": ".join(filter(None, (level.label, level.description))) for level in question.levels]
    return make_question(place, "score", asked, [str(number) for number in range(len(levels))], levels, files)


def _answer(question: AnyQuestion, answer: Decision) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=answer.yes)
    if isinstance(question, ChoiceQuestion):
        pairs = zip(question.choices, answer.probabilities, strict=True)
        return ChoiceAnswer(
            name=question.name,
            choice=question.choices[answer.best].value,
            confidence=answer.confidence,
            probabilities=[ChoiceShare(value=choice.value, probability=share) for choice, share in pairs],
        )
    shares = enumerate(zip(question.levels, answer.probabilities, strict=True))
    return ScoreAnswer(
        name=question.name,
        score=answer.score,
        confidence=answer.confidence,
        probabilities=[LevelShare(label=level.label, value=at, probability=share) for at, (level, share) in shares],
    )


def _text(value: Any, place: str) -> str:
    """Return the text of a value that may have parts. Raises ApiError: another value or part, or nothing."""
    if isinstance(value, str):
        text = value
    elif not isinstance(value, list):
        raise bad_request(f"'{place}': a text, or a list of parts.", place)
    else:
        text = "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(value))
    if not text:
        raise bad_request(f"'{place}' must not be empty.", place)
    return text


def _part(part: Any, place: str) -> str:
    if not isinstance(part, Mapping):
        raise bad_request(f"'{place}': a part is an object with a type.", place)
    kind = part.get("type")
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind in ("json", "input_json"):
        return as_text(part.get("json", part.get("data")))
    raise bad_request(f"'{place}': a part of type {kind!r} is not supported in decisions.", place)


def _messages(items: Sequence[Mapping[str, Any]], media: MediaReader | None) -> list[dict[str, Any]]:
    """Return the items of a request as messages for the chat template. Raises ApiError: names the item at fault."""
    messages: list[dict[str, Any]] = []
    calls: dict[str, str] = {}  # names of what was called
    for index, item in enumerate(items):
        place, kind = f"input[{index}]", item.get("type", "message")
        if not isinstance(kind, str):
            raise bad_request(f"'{place}.type': a text is expected.", f"{place}.type")
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise bad_request(f"'{place}.role': user, assistant, system or developer.", f"{place}.role")
            content = item.get("content")
            if not isinstance(content, str | list):
                raise bad_request(f"'{place}.content': a text, or a list of parts.", f"{place}.content")
            messages.append({"role": role, "content": seen_content(content, f"{place}.content", media, _text)})
        elif kind in _CALLS:
            name, call_id, given = str(item.get("name", "")), str(item.get("call_id", "")), item.get(_CALLS[kind], "")
            calls[call_id] = name
            function = {"name": name, "arguments": _arguments(given)}
            call = {"id": call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind in _OUTPUTS:
            call_id, output = str(item.get("call_id", "")), item.get("output")
            if call_id not in calls:
                raise bad_request(f"'{place}.call_id': no call before it has this id.", f"{place}.call_id")
            text = output if isinstance(output, str) else _text([] if output is None else output, f"{place}.output")
            messages.append({"role": "tool", "content": text, "name": calls[call_id], "tool_call_id": call_id})
        else:
            raise bad_request(f"'{place}.type': {kind!r} is not supported in decisions.", f"{place}.type")
    return messages


def _arguments(given: object) -> object:
    """Return the arguments of a call as an object, where they are one."""
    try:
        parsed = msgspec.json.decode(given) if isinstance(given, str) else given
    except msgspec.DecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"input": given}


def as_unprocessable(error: ApiError) -> ApiError:
    """Return an error of the client as `/v1/systemone` has it: 422."""
    if error.status != 400:
        return error
    return ApiError(422, error.detail.message, param=error.detail.param, code=error.detail.code, headers=error.headers)
