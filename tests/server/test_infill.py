"""`suffix`, over HTTP: what stands between two texts."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.http_server import HttpServer

from octavo.demo import demo_model_path
from octavo.tokenizer.tokenizer import Tokenizer

# The demo model's tokens, and what they are called here.
NAMES = {"<think>": "<|fim_prefix|>", "</think>": "<|fim_suffix|>", "<tool_response>": "<|fim_middle|>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose vocabulary has the tokens."""
    made = tmp_path_factory.mktemp("infill") / "coder"
    shutil.copytree(demo_model_path(), made, ignore=shutil.ignore_patterns("vl", "__pycache__"))
    for path in (made / "tokenizer.json", made / "tokenizer_config.json"):
        text = path.read_text(encoding="utf-8")
        for old, new in NAMES.items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    with HttpServer(model=str(folder)) as running:
        yield running


def complete(server: HttpServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"max_tokens": 8, "seed": 1, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_the_model_is_asked_for_the_middle(server: HttpServer, folder: Path) -> None:
    tokenizer = Tokenizer.from_path(folder)
    before, after = tokenizer.encode("def f("), tokenizer.encode("    return x")
    pre, suf, mid = (tokenizer.token_id(name) for name in NAMES.values())
    reply = complete(server, prompt="def f(", suffix="    return x")
    [choice] = reply["choices"]
    assert choice["prompt_token_ids"] == [pre, *before, suf, *after, mid]
    assert complete(server, prompt=before, suffix="    return x")["choices"][0]["token_ids"] == choice["token_ids"]
    plain = complete(server, prompt=choice["prompt_token_ids"])["choices"][0]["text"]
    assert plain.startswith(choice["text"])  # and is not ended by the tokens for the hole


def test_the_next_file_is_not_part_of_it(server: HttpServer, folder: Path) -> None:
    """A control token for the hole ends the answer, and is not shown."""
    bias = {str(Tokenizer.from_path(folder).token_id("<|fim_prefix|>")): 100.0}
    [choice] = complete(server, prompt="a", suffix="b", logit_bias=bias)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_ollamas_route_takes_it_too(server: HttpServer) -> None:
    said = {"prompt": "def f(", "suffix": "x", "stream": False, "options": {"num_predict": 4, "seed": 3}}
    assert server.post("/api/generate", said).json()["done_reason"] in ("length", "stop")
    assert "insert" in server.post("/api/show", {"model": "coder"}).json()["capabilities"]


@pytest.mark.parametrize("fields", [{"echo": True}, {"truncate_prompt_tokens": 3}])
def test_options_about_the_prompts_text_are_refused(server: HttpServer, fields: dict[str, Any]) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "suffix": "b", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))
