"""openai-python with pictures: the bundled model that sees answers those it was never trained on."""

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import openai
import pytest
from openai import OpenAI
from PIL import Image
from tests.breadth import pick
from tests.clients.conftest import SERVER_PYTHON
from tests.server.http_server import HttpServer
from tools.demo_model.seeing.held_out import held_out
from tools.demo_model.seeing.questions import TASKS

MODEL = "demo-vl"


@pytest.fixture(scope="module")
def seeing() -> Iterator[OpenAI]:
    with (
        HttpServer(model=MODEL, python=SERVER_PYTHON) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client
        assert "Traceback" not in server.log


def question(picture: Image.Image, text: str) -> Any:
    file = BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def answer(client: OpenAI, messages: Any) -> str:
    reply = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=64)
    return str(reply.choices[0].message.content)


def test_it_answers_held_out_pictures(seeing: OpenAI) -> None:
    asked = [item for task in TASKS for item in held_out(task, pick(10, 50))]
    answers = [answer(seeing, question(item.picture, item.question.text)) for item in asked]
    right = sum(given == item.question.answer for given, item in zip(answers, asked, strict=True))
    assert right >= 0.95 * len(asked)


def test_a_stream_spells_the_answer_and_usage_counts_the_picture(seeing: OpenAI) -> None:
    [item] = held_out("describe", 1)
    messages = question(item.picture, item.question.text)
    with seeing.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == answer(
        seeing, messages
    )
    without = [{"role": "user", "content": item.question.text}]
    blind = seeing.chat.completions.create(model=MODEL, messages=without, temperature=0, max_tokens=1)
    assert last.usage.prompt_tokens == blind.usage.prompt_tokens + 3 * 3 + 2  # and where it begins and ends


def test_what_is_no_picture_is_an_error_that_names_it(seeing: OpenAI) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="not a picture") as caught:
        seeing.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert caught.value.param == "messages[0].content[0].image_url"
