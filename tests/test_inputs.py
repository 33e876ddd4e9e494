"""The forms in which a prompt may be given, and those that are refused because they could mean two things."""

from typing import Any

import pytest

from octavo.errors import InvalidParameterError
from octavo.inputs import as_prompt_list, parse_prompt


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("Hello", "Hello"),
        ("", ""),
        ({"prompt": "Hello"}, "Hello"),
        ({"prompt_token_ids": [1, 2]}, [1, 2]),
        ({"prompt_token_ids": (1, 2)}, [1, 2]),
    ],
)
def test_known_forms(prompt: object, parsed: str | list[int]) -> None:
    assert parse_prompt(prompt) == parsed


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ([1, 2], "prompt"),
        (b"bytes", "prompt"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"text": "x"}, "prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, "2"]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, 2.0]}, "prompt_token_ids"),
    ],
)
def test_anything_else_is_refused(prompt: object, field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        parse_prompt(prompt)
    assert caught.value.field == field


def test_token_ids_are_copied() -> None:
    token_ids = [1, 2]
    parsed = parse_prompt({"prompt_token_ids": token_ids})
    token_ids.append(3)
    assert parsed == [1, 2]


@pytest.mark.parametrize("prompt", ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": [1]}])
def test_one_prompt_becomes_a_list_of_one(prompt: Any) -> None:
    assert as_prompt_list(prompt) == [prompt]


def test_lists_stay_lists_and_are_copied() -> None:
    prompts: list[Any] = ["a", {"prompt": "b"}]
    listed = as_prompt_list(prompts)
    assert listed == prompts
    assert listed is not prompts
    assert as_prompt_list(("a", "b")) == ["a", "b"]
    assert as_prompt_list([]) == []


@pytest.mark.parametrize("prompts", [[1, 2, 3], 5, None, {"a", "b"}])
def test_what_could_mean_two_things_is_refused(prompts: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        as_prompt_list(prompts)
    assert caught.value.field == "prompts"


def test_bare_token_ids_say_where_they_go() -> None:
    with pytest.raises(InvalidParameterError, match="token ids go in"):
        as_prompt_list([1, 2, 3])
