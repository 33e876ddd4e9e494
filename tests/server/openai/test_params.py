"""Wire fields to `SamplingParams`, forms of answers, and the names by which a model is found."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.errors import InvalidParameterError
from octavo.sampling_params import SamplingParams
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.openai.models import ModelAliases, ServedModels
from octavo.server.openai.params import (
    chat_params,
    completion_params,
    requested_constraint,
    split_prompts,
    truncated,
    wire_names,
)
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.structured_output import StructuredOutput

DEFAULTS = SamplingParams(temperature=0.3, top_p=0.9)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = SCHEMA | {"additionalProperties": False}


def chat(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatCompletionRequest)


def text(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


def test_what_is_not_given_is_the_checkpoints_default() -> None:
    params = chat_params(chat(top_p=0.5), DEFAULTS)
    assert (params.temperature, params.top_p) == (0.3, 0.5)


def test_caps() -> None:
    assert chat_params(chat(), DEFAULTS).max_tokens is None
    assert chat_params(chat(max_tokens=5), DEFAULTS).max_tokens == 5
    assert chat_params(chat(max_tokens=5, max_completion_tokens=7), DEFAULTS).max_tokens == 7
    assert completion_params(text(), DEFAULTS).max_tokens == 16
    assert completion_params(text(max_tokens=0), DEFAULTS).max_tokens == 1
    for no_limit in (chat(max_tokens=-1), chat(max_completion_tokens=-1, max_tokens=5)):
        assert chat_params(no_limit, DEFAULTS).max_tokens is None
    assert completion_params(text(max_tokens=-1), DEFAULTS).max_tokens is None


def test_logprobs_have_two_spellings() -> None:
    assert chat_params(chat(), DEFAULTS).logprobs is None
    assert chat_params(chat(logprobs=True), DEFAULTS).logprobs == 0
    assert chat_params(chat(logprobs=True, top_logprobs=3), DEFAULTS).logprobs == 3
    assert chat_params(chat(logprobs=False), DEFAULTS).logprobs is None
    with pytest.raises(ApiError, match="needs 'logprobs'"):
        chat_params(chat(top_logprobs=3), DEFAULTS)
    assert completion_params(text(logprobs=4), DEFAULTS).logprobs == 4
    assert completion_params(text(logprobs=4, echo=True), DEFAULTS).prompt_logprobs == 4


def test_values_that_clients_send_for_none() -> None:
    for stop in ("", [], [""], None):
        assert chat_params(chat(stop=stop), DEFAULTS).stop == DEFAULTS.stop
    assert chat_params(chat(stop=["", "x"]), DEFAULTS).stop == ("x",)
    assert chat_params(chat(top_logprobs=0), DEFAULTS).logprobs is None


def test_a_nucleus_of_nothing_is_the_most_likely_token() -> None:
    params = chat_params(chat(top_p=0, top_k=40), DEFAULTS)
    assert (params.top_k, params.top_p) == (1, DEFAULTS.top_p)


def test_a_seed_may_be_any_integer_of_64_bits() -> None:
    assert chat_params(chat(seed=-1), DEFAULTS).seed == 2**64 - 1
    assert chat_params(chat(seed=2**63), DEFAULTS).seed == 2**63
    with pytest.raises(InvalidParameterError, match="seed"):
        chat_params(chat(seed=-(2**63) - 1), DEFAULTS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ],
)
def test_an_error_names_the_field_as_the_client_spelt_it(fields: dict[str, Any], param: str) -> None:
    request = chat(**fields)
    with pytest.raises(InvalidParameterError) as caught:
        chat_params(request, DEFAULTS)
    assert as_api_error(caught.value, wire_names(request)).detail.param == param


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutput(json_schema=CLOSED)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutput(json_schema=CLOSED),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=CLOSED)),
        ({"guided_regex": "a+"}, StructuredOutput(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choice=["a", "b"])),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput(json_schema=CLOSED)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
    ],
)
def test_forms(fields: dict[str, Any], constraint: StructuredOutput | None) -> None:
    assert requested_constraint(chat(**fields)) == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
)
def test_forms_that_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        requested_constraint(chat(**fields))
    assert (caught.value.status, caught.value.detail.param) == (400, param)


def test_prompts() -> None:
    ids = {"prompt_token_ids": [1, 2]}
    assert split_prompts("x", 2) == ["x"]
    assert split_prompts([1, 2], 2) == [ids]
    assert split_prompts(["x", [1, 2]], 2) == ["x", ids]
    mixed: list[list[str | int | list[int]]] = [[], [1, "x"], ["x", 1], ["x", "y", "z"]]
    for wrong in mixed:
        with pytest.raises(ApiError):
            split_prompts(wrong, 2)


def test_a_prompt_keeps_its_end_when_it_is_cut() -> None:
    prompt = {"prompt_token_ids": [1, 2, 3]}
    assert truncated(prompt, None) == truncated(prompt, 9) == prompt
    assert truncated(prompt, 2) == {"prompt_token_ids": [2, 3]}
    with pytest.raises(ApiError, match="at least 1"):
        truncated(prompt, 0)


def served(model_name: str, aliases: list[str]) -> ServedModels:
    front = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(max_model_len=100, encoder=None)))
    return ServedModels(cast("AsyncLLMEngine", SimpleNamespace(front=front)), model_name, aliases, None)


def found(models: ServedModels, name: str | None) -> str:
    return models.find(name).card.id


def test_a_model_is_found_by_name_last_part_and_alias_in_any_case() -> None:
    names = served("Qwen/Qwen3-0.6B", ["main", "org/Other"])
    assert found(names, None) == "main"
    assert found(names, "MAIN") == "main"
    assert found(names, "other") == "org/Other"
    assert found(names, "qwen/qwen3-0.6b") == found(names, "Qwen3-0.6b") == "main"
    assert [card.id for card in names.cards] == ["main", "org/Other"]
    assert names.find("other").card.max_model_len == 100
    with pytest.raises(ApiError, match="does not exist") as caught:
        names.find("x" * 1000)
    assert (caught.value.status, caught.value.detail.code) == (404, "model_not_found")
    assert len(caught.value.detail.message) < 300


def test_a_model_without_aliases_goes_by_its_own_name() -> None:
    names = served("/models/Tiny", [])
    assert found(names, "tiny") == found(names, None) == "/models/Tiny"


def aliased(*values: str) -> ServedModels:
    front = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(max_model_len=100, encoder=None)))
    engine = cast("AsyncLLMEngine", SimpleNamespace(front=front))
    return ServedModels(engine, "org/Demo", ["main"], None, ModelAliases(values))


def test_an_alias_is_one_more_name_and_hides_no_model() -> None:
    models = aliased("claude-*=MAIN", "fast=org/demo", "f*=nowhere", "main=nowhere")
    for name in ("claude-haiku-4-5", "Claude-Opus", "FAST", "main", "demo"):
        assert found(models, name) == "main"
    for name in ("claude", "fastest"):
        with pytest.raises(ApiError, match=f"'{name}' does not exist"):
            models.find(name)
    assert [card.id for card in models.cards] == ["main"]


def test_an_alias_of_nothing_is_an_error_at_the_start() -> None:
    aliased("a=main", "b=Demo", "c=ORG/demo").check_aliases()
    with pytest.raises(InvalidParameterError, match=r"model_alias='b=other'.*'other'"):
        aliased("a=main", "b=other").check_aliases()
    for wrong in ("name", "=model", "name="):
        with pytest.raises(InvalidParameterError, match="NAME=MODEL"):
            ServerArgs(model_alias=(wrong,))
