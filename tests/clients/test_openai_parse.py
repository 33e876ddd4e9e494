"""openai-python's `.parse()`: pydantic models out of schemas that the server enforced."""

import enum

import openai
import pydantic
import pytest
from openai import OpenAI
from tests.clients.words import ADA, GREEDY, MODEL, RECORD, Person


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Leaf(pydantic.BaseModel):
    """Something with all that a schema may need: nesting, lists, enums, choices, null."""

    colour: Colour
    size: float | None
    tags: list[str] = pydantic.Field(max_length=3)
    owner: Person


def test_an_answer_comes_as_the_class_that_was_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.parse(**GREEDY, messages=RECORD, response_format=Person)
    assert answer.choices[0].message.parsed == ADA


def test_the_streaming_helper_parses_too(client: OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, messages=RECORD, response_format=Person) as stream:
        assert "content.delta" in {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == ADA


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_knows_nothing_of_it_still_obeys(client: OpenAI, seed: int) -> None:
    fields = {"model": MODEL, "temperature": 1.2, "seed": seed, "max_tokens": 1500}
    messages = [{"role": "user", "content": "Tell me about a leaf."}]
    try:
        answer = client.chat.completions.parse(**fields, messages=messages, response_format=Leaf)
    except openai.LengthFinishReasonError:
        return  # cut by the cap, and said so: that is allowed
    assert isinstance(answer.choices[0].message.parsed, Leaf)


def test_a_schema_that_cannot_be_is_refused_before_any_work(client: OpenAI) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=RECORD, response_format=bad)
    assert str(caught.value.param).startswith("response_format")
