"""Keys, as openai-python sends them."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from tests.clients.conftest import SERVER_PYTHON
from tests.clients.words import GREEDY, QUESTION
from tests.server.http_server import HttpServer


@pytest.fixture(scope="module")
def locked() -> Iterator[HttpServer]:
    with HttpServer("--api-key", "first", "--api-key", "second", python=SERVER_PYTHON) as running:
        yield running


def client_of(server: HttpServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize("key", ["first", "second"])
def test_the_right_key(locked: HttpServer, key: str) -> None:
    with client_of(locked, key) as client:
        assert client.models.list().data
        assert client.chat.completions.create(**GREEDY, messages=QUESTION).choices


@pytest.mark.parametrize("key", ["third", "firs", "firstfirst", "FIRST"])
def test_a_wrong_key(locked: HttpServer, key: str) -> None:
    with client_of(locked, key) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.body["message"]
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(**GREEDY, messages=QUESTION, stream=True)
