"""Clients that come back, as openai-python can: with headers of their own."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI, UnprocessableEntityError
from tests.clients.conftest import SERVER_PYTHON
from tests.clients.words import QUESTION
from tests.server.http_server import HttpServer

LONG: Any = {"model": "demo", "max_tokens": 40, "seed": 5, "temperature": 1.0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def returning() -> Iterator[OpenAI]:
    with (
        HttpServer("--resume-s", "60", python=SERVER_PYTHON) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client
        assert "Traceback" not in server.log


def test_the_rest_of_a_stream_that_was_left(returning: OpenAI) -> None:
    undisturbed = list(returning.chat.completions.create(**LONG, messages=QUESTION, stream=True))
    got: list[Any] = []
    with returning.chat.completions.create(**LONG, messages=QUESTION, stream=True) as stream:
        for chunk in stream:
            got.append(chunk)
            if len(got) == 9:
                break
    back = {"Last-Event-ID": f"{got[0].id}:{len(got)}"}
    got += returning.chat.completions.create(**LONG, messages=QUESTION, stream=True, extra_headers=back)
    assert len({chunk.id for chunk in got}) == 1
    assert [chunk.choices for chunk in got] == [chunk.choices for chunk in undisturbed]


def test_a_request_that_is_sent_twice(returning: OpenAI) -> None:
    key = {"Idempotency-Key": "once"}
    body = {**LONG, "seed": None}
    first, second = (returning.chat.completions.create(**body, messages=QUESTION, extra_headers=key) for _ in range(2))
    assert first == second
    with pytest.raises(UnprocessableEntityError) as caught:
        returning.chat.completions.create(**{**body, "max_tokens": 3}, messages=QUESTION, extra_headers=key)
    assert caught.value.code == "idempotency_key_reused"
