"""Ollama's API over real HTTP: the same answers as OpenAI's routes give, in its form."""

import json
from datetime import datetime
from typing import Any

import pytest
from tests.server.http_server import HttpServer
from tests.server.test_tools import QUESTION as WEATHER_QUESTION
from tests.server.test_tools import WEATHER

QUESTION = [{"role": "user", "content": "What is Octavo?"}]
SUM = [{"role": "user", "content": "What is 123 + 456?"}]
TOTALS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def whole(server: HttpServer, path: str = "/api/chat", **fields: Any) -> dict[str, Any]:
    """One answer that is not streamed; greedy, unless it says otherwise."""
    response = server.post(path, {"stream": False, "options": {"temperature": 0}, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def lines(server: HttpServer, path: str = "/api/chat", **fields: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which is what one gets by default."""
    response = server.post(path, {"options": {"temperature": 0}, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def chat(server: HttpServer, **fields: Any) -> dict[str, Any]:
    """The same question by OpenAI's route."""
    reply = server.post("/v1/chat/completions", {"temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_an_answer_is_that_of_openais_route(server: HttpServer) -> None:
    reply, other = whole(server, messages=QUESTION), chat(server, messages=QUESTION)
    assert reply["message"] == {"role": "assistant", "content": other["choices"][0]["message"]["content"]}
    assert (reply["done"], reply["done_reason"]) == (True, "stop")
    counts = (other["usage"]["prompt_tokens"], other["usage"]["completion_tokens"])
    assert (reply["prompt_eval_count"], reply["eval_count"]) == counts
    assert reply.keys() >= TOTALS
    assert all(isinstance(reply[name], int) for name in TOTALS)
    assert reply["total_duration"] >= reply["prompt_eval_duration"] + reply["eval_duration"] - 1000
    assert reply["eval_duration"] > 0
    assert datetime.fromisoformat(reply["created_at"]).tzinfo is not None


def test_lines_spell_the_answer(server: HttpServer) -> None:
    *pieces, last = lines(server, model="demo:latest", messages=QUESTION)
    text = "".join(piece["message"]["content"] for piece in pieces)
    assert text == whole(server, messages=QUESTION)["message"]["content"]
    assert len(pieces) > 1
    assert not any(piece["done"] or piece.keys() & TOTALS for piece in pieces)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last.keys() >= TOTALS
    assert {piece["model"] for piece in (*pieces, last)} == {"demo:latest"}


def test_options_are_sampling_parameters_and_others_are_named(server: HttpServer) -> None:
    options = {"temperature": 0, "num_predict": 3, "num_ctx": 4096, "mirostat": 1, "typo_p": 1}
    response = server.post("/api/chat", {"messages": QUESTION, "stream": False, "options": options, "keep_alive": "5m"})
    assert (response.json()["eval_count"], response.json()["done_reason"]) == (3, "length")
    named = response.headers["x-octavo-warnings"]
    for name in ("options.num_ctx", "options.mirostat", "typo_p", "keep_alive"):
        assert name in named
    for keep_alive in (-1, "-1m"):  # what is the case
        response = server.post("/api/chat", {"messages": QUESTION, "stream": False, "keep_alive": keep_alive})
        assert "x-octavo-warnings" not in response.headers
    wild = {"temperature": 1.9, "seed": 7, "num_predict": 20, "top_k": 0, "top_p": 0.9, "min_p": 0, "stop": ["zz"]}
    same = [whole(server, messages=QUESTION, options=wild)["message"] for _ in range(2)]
    fields = {name: value for name, value in wild.items() if name != "num_predict"}
    other = chat(server, messages=QUESTION, **fields, max_tokens=20)["choices"][0]["message"]["content"]
    assert [each["content"] for each in same] == [other, other]
    assert whole(server, messages=QUESTION, options={"temperature": 0, "num_predict": -1})["done_reason"] == "stop"


@pytest.mark.parametrize("is_stream", [True, False])
def test_calls_have_their_arguments_as_objects(server: HttpServer, is_stream: bool) -> None:
    fields: dict[str, Any] = {"messages": [WEATHER_QUESTION], "tools": [WEATHER]}
    replies = lines(server, **fields) if is_stream else [whole(server, **fields)]
    calls = [call for reply in replies for call in reply["message"].get("tool_calls", [])]
    [call] = calls
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    assert call["id"]
    assert replies[-1]["done_reason"] == "stop"
    if is_stream:
        assert "tool_calls" not in replies[-1]["message"]
    history = [
        WEATHER_QUESTION,
        replies[0]["message"],
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    answer = whole(server, messages=history, tools=[WEATHER])
    openai_call = {**call, "type": "function", "function": {**call["function"], "arguments": '{"city": "Paris"}'}}
    openai_history = [
        WEATHER_QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [openai_call]},
        {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": "sunny"},
    ]
    other = chat(server, messages=openai_history, tools=[WEATHER])
    assert answer["message"]["content"] == other["choices"][0]["message"]["content"]
    assert answer["prompt_eval_count"] == other["usage"]["prompt_tokens"]


def test_a_call_that_the_limit_cuts_is_none(server: HttpServer) -> None:
    options = {"temperature": 0, "num_predict": 15}
    reply = whole(server, messages=[WEATHER_QUESTION], tools=[WEATHER], options=options)
    assert (reply["message"], reply["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


def test_thoughts_are_apart(server: HttpServer) -> None:
    reply = whole(server, messages=SUM, think=True)["message"]
    assert reply["thinking"]
    assert "579" in reply["content"]
    *pieces, _ = lines(server, messages=SUM, think="high")
    for name in ("thinking", "content"):
        assert "".join(piece["message"].get(name, "") for piece in pieces) == reply[name]
    assert "thinking" not in whole(server, messages=SUM, think=False)["message"]
    prompted = whole(server, "/api/generate", prompt=SUM[0]["content"], think=True)
    assert (prompted["thinking"], prompted["response"]) == (reply["thinking"], reply["content"])


def test_format_is_json_or_a_schema(server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for path, text in (("/api/chat", {"messages": QUESTION}), ("/api/generate", {"prompt": "What is Octavo?"})):
        options = {"temperature": 0, "num_predict": 40}
        reply = whole(server, path, **text, format=schema, think=False, options=options)
        answer = json.loads(reply["response"] if path == "/api/generate" else reply["message"]["content"])
        assert isinstance(answer["n"], int)
        assert answer.keys() == {"n"}
    fields: dict[str, Any] = {"messages": QUESTION, "think": False, "options": {"num_predict": 30}}
    text = whole(server, **fields, format="json")["message"]["content"]
    assert text.lstrip().startswith("{")


def test_a_prompt_goes_through_the_template_unless_it_is_raw(server: HttpServer) -> None:
    reply = whole(server, "/api/generate", prompt=QUESTION[0]["content"])
    assert reply["response"] == whole(server, messages=QUESTION)["message"]["content"]
    with_system = whole(server, "/api/generate", prompt="What is Octavo?", system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert with_system["prompt_eval_count"] == whole(server, messages=[system, *QUESTION])["prompt_eval_count"]
    options = {"temperature": 0, "num_predict": 6}
    raw = whole(server, "/api/generate", prompt="Octavo is", raw=True, options=options)
    body = {"prompt": "Octavo is", "max_tokens": 6, "temperature": 0}
    other = server.post("/v1/completions", body).json()
    assert raw["response"] == other["choices"][0]["text"]
    *pieces, last = lines(server, "/api/generate", prompt="Octavo is", raw=True, options=options)
    assert "".join(piece["response"] for piece in pieces) == raw["response"]
    assert last["eval_count"] == 6


@pytest.mark.parametrize("fields", [{"messages": QUESTION}, {"prompt": "Octavo is", "raw": True}])
def test_logprobs_spell_the_text(server: HttpServer, fields: dict[str, Any]) -> None:
    path = "/api/chat" if "messages" in fields else "/api/generate"
    wanted = {**fields, "logprobs": True, "top_logprobs": 2, "options": {"temperature": 0, "num_predict": 6}}
    reply = whole(server, path, **wanted)
    text = reply["response"] if "response" in reply else reply["message"]["content"]
    assert bytes(byte for row in reply["logprobs"] for byte in row["bytes"]).decode() == text
    assert all(len(row["top_logprobs"]) == 2 for row in reply["logprobs"])
    streamed = [row for line in lines(server, path, **wanted) for row in line.get("logprobs", [])]
    assert streamed == reply["logprobs"]


def test_an_empty_request_asks_whether_the_model_is_loaded(server: HttpServer) -> None:
    assert whole(server, messages=[])["done_reason"] == "load"
    assert whole(server, "/api/generate", keep_alive=0)["done_reason"] == "load"
    [line] = lines(server, "/api/generate", model="demo")
    assert (line["done"], line["done_reason"], line["response"]) == (True, "load", "")


def test_vectors_are_those_of_openais_route(server: HttpServer) -> None:
    texts = ["Hello", "What is a block?"]
    reply = whole(server, "/api/embed", input=texts)
    other = server.post("/v1/embeddings", {"input": texts}).json()
    assert reply["embeddings"] == [each["embedding"] for each in other["data"]]
    assert reply["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    assert whole(server, "/api/embeddings", prompt="Hello") == {"embedding": reply["embeddings"][0]}
    assert whole(server, "/api/embed", input="Hello")["embeddings"] == reply["embeddings"][:1]
    assert whole(server, "/api/embed", input=[])["embeddings"] == []
    long = "word " * 3000
    cut = whole(server, "/api/embed", input=[long, "Hello"])
    assert len(cut["embeddings"]) == 2
    refused = server.post("/api/embed", {"input": long, "truncate": False})
    assert refused.status_code == 400
    assert "maximum context length" in refused.json()["error"]


def test_the_model_is_described(server: HttpServer) -> None:
    [listed] = server.client.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"]) == ("demo:latest", "demo:latest")
    assert listed["size"] > 1_000_000
    assert len(listed["digest"]) == 64
    assert listed["details"]["family"] == "qwen3"
    [running] = server.client.get("/api/ps").json()["models"]
    assert {name: running[name] for name in listed} == listed
    assert running["context_length"] == 2048
    assert datetime.fromisoformat(running["expires_at"]) > datetime.fromisoformat("2100-01-01T00:00:00Z")
    shown = whole(server, "/api/show", model="demo:latest")
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["qwen3.context_length"] == 2048
    assert "messages" in shown["template"]
    assert whole(server, "/api/show", name="demo") == shown
    assert server.client.get("/api/version").json()["version"]
    assert whole(server, "/api/pull", model="demo") == {"status": "success"}
    assert lines(server, "/api/pull", model="demo")[-1] == {"status": "success"}
    assert server.client.head("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "status", "named"),
    [
        ("/api/chat", {"model": "llama3", "messages": QUESTION}, 404, "model 'llama3' not found"),
        ("/api/pull", {"model": "llama3"}, 404, "demo:latest"),
        ("/api/show", {"model": "llama3:latest"}, 404, "llama3"),
        ("/api/chat", {"messages": QUESTION, "format": "xml"}, 400, "format"),
        ("/api/chat", {"messages": QUESTION, "format": {"type": "nope"}}, 400, "format="),
        ("/api/chat", {"messages": QUESTION, "options": {"temperature": -1}}, 400, "options.temperature=-1"),
        ("/api/chat", {"messages": QUESTION, "options": {"repeat_penalty": -1}}, 400, "options.repeat_penalty=-1"),
        ("/api/chat", {"messages": QUESTION, "options": {"top_k": "many"}}, 400, "top_k"),
        ("/api/chat", {"messages": QUESTION, "think": "lots"}, 400, "think must be one of"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "only text"),
        ("/api/chat", {"messages": "x"}, 400, "messages"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "Templates"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"prompt": "x", "raw": True, "images": ["aGk="]}, 400, "images"),
        ("/api/embed", {"input": ["a"] * 2049}, 400, "2048"),
        ("/api/create", {"model": "x"}, 404, "/api/create"),
    ],
)
def test_errors_are_texts(server: HttpServer, path: str, fields: dict[str, Any], status: int, named: str) -> None:
    response = server.post(path, fields)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert named in response.json()["error"]


def test_bodies_as_curl_sends_them(server: HttpServer) -> None:
    """`curl -d` says that JSON is a form; so would a page of another site, which has an origin."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"messages": QUESTION, "stream": False, "options": {"num_predict": 1}}).encode()
    assert server.client.post("/api/chat", content=body, headers=form).status_code == 200
    foreign = server.client.post("/api/chat", content=body, headers={**form, "origin": "https://example.com"})
    assert (foreign.status_code, foreign.json().keys()) == (415, {"error"})
    assert server.client.post("/v1/chat/completions", content=body, headers=form).status_code == 415


def test_keys_deadlines_and_parsers_that_are_off() -> None:
    flags = ("--api-key", "sesame", "--reasoning-parser", "none", "--tool-call-parser", "none")
    with HttpServer(*flags, has_model=False, headers={"x-api-key": "sesame"}) as server:
        refused = server.client.get("/api/tags", headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()) == (401, {"error": "The API key is not valid."})
        [listed] = server.client.get("/api/tags").json()["models"]
        assert whole(server, "/api/show", model=listed["name"])["capabilities"] == ["completion"]
        thinking = server.post("/api/chat", {"messages": QUESTION, "think": True})
        assert (thinking.status_code, thinking.json()["error"]) == (400, '"demo" does not support thinking')
        assert whole(server, messages=QUESTION, think=False, options={"num_predict": 2})["done"]
        body = {"prompt": "x", "raw": True, "options": {"num_predict": 1900, "seed": 5}}  # which goes on for long
        cut = server.client.post("/api/generate", json=body, headers={"x-request-timeout": "2"})
        assert cut.status_code == 200
        assert "time limit" in json.loads(cut.text.splitlines()[-1])["error"]
