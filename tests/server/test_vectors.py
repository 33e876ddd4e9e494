"""Rerank, score, pooling and decisions over HTTP, in each API's shape; an encoder; mistakes that say which."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.encoders import save, save_modules
from tests.server.http_server import HttpServer

DOCUMENTS = ["A block holds tokens.", "It rains.", "What is a block?"]
STATE = "WIN a FREE phone! <|im_end|> Click here."
SPAM = {"type": "noul", "instructions": "Is this spam?"}
TONE = {"type": "choice", "instructions": "The tone?", "criteria": {"calm": "polite", "pushy": None, "sad": None}}
URGENCY = {"type": "score", "instructions": "How urgent is it?", "criteria": ["not at all", "a little", "very"]}


def ask(server: HttpServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_is_by_score(server: HttpServer, path: str) -> None:
    reply = ask(
        server, path, query="What is a block?", documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}], model="demo"
    )
    scores = ask(server, "/score", text_1="What is a block?", text_2=DOCUMENTS)
    by_index = {each["index"]: each["score"] for each in scores["data"]}
    found = [(each["index"], each["relevance_score"]) for each in reply["results"]]
    assert found == sorted(by_index.items(), key=lambda pair: -pair[1])
    assert found[0] == (2, pytest.approx(1.0))
    assert ("document" in reply["results"][0]) == (path != "/v2/rerank")
    assert reply["usage"]["total_tokens"] > 0
    best = ask(server, path, query="What is a block?", documents=DOCUMENTS, top_n=1, return_documents=True)
    assert best["results"] == [
        {"index": 2, "relevance_score": found[0][1], "document": {"text": DOCUMENTS[2]}},
    ]


def test_pooling_is_what_embeddings_are_made_of(server: HttpServer) -> None:
    [raw] = ask(server, "/pooling", input="Hello", normalize=False)["data"]
    [unit] = ask(server, "/v1/embeddings", input="Hello")["data"]
    length = sum(value * value for value in raw["data"]) ** 0.5
    assert [value / length for value in raw["data"]] == pytest.approx(unit["embedding"])


def test_decisions_are_the_same_bits_alone_together_and_on_both_routes(server: HttpServer) -> None:
    asked = {"spam": SPAM, "tone": TONE, "urgency": URGENCY}
    together = ask(server, "/v1/systemone", state=STATE, questions=asked)
    for name, question in asked.items():
        alone = ask(server, "/v1/systemone", state=STATE, questions={name: question})
        assert alone["answers"] == {name: together["answers"][name]}
    choices = [{"value": key, "description": said} for key, said in TONE["criteria"].items()]  # type: ignore[attr-defined]
    levels = [{"label": label} for label in URGENCY["criteria"]]
    questions = [
        {"type": "predicate", "instructions": SPAM["instructions"], "name": "spam"},
        {"type": "choice", "instructions": TONE["instructions"], "choices": choices},
        {"type": "score", "instructions": URGENCY["instructions"], "levels": levels},
    ]
    reply = ask(server, "/v1/decisions", input=STATE, questions=questions)
    spam, tone, urgency = reply["answers"]
    assert spam == {"type": "predicate", "name": "spam", "probability": together["answers"]["spam"]["noul"]}
    by_value = {each["value"]: each["probability"] for each in tone["probabilities"]}
    assert by_value == together["answers"]["tone"]["probabilities"]
    assert sum(by_value.values()) == pytest.approx(1.0)
    assert tone["confidence"] == together["answers"]["tone"]["confidence"]
    assert [each["value"] for each in urgency["probabilities"]] == [0, 1, 2]
    assert urgency["score"] == together["answers"]["urgency"]["score"]
    usage = reply["usage"]
    own = [ask(server, "/v1/decisions", input=STATE, questions=[each])["usage"]["input_tokens"] for each in questions]
    assert max(own) < usage["input_tokens"] < sum(own)
    assert (usage["output_tokens"], usage["total_tokens"]) == (0, usage["input_tokens"])


def test_many_options_and_conversations(server: HttpServer) -> None:
    options = [{"value": f"option {number}"} for number in range(40)]
    question = {"type": "choice", "instructions": "Which?", "choices": [*options, {"value": True}, {"value": "true"}]}
    chat = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look it up."}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
    ]
    for given in ("Some state.", chat[:1]):
        [answer] = ask(server, "/v1/decisions", input=given, questions=[question])["answers"]
        assert len(answer["probabilities"]) == 42
        assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1.0)
    wrong = server.post("/v1/decisions", {"input": chat[2:], "questions": [question]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input[0].call_id")


ASKED = {"type": "predicate", "instructions": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
SAID = {"role": "user"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, 400, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, 400, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n"),
        ("/v2/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, 400, "max_tokens_per_doc"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "x"}, 400, "instruction"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_2"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": ["a", "word " * 20_000]}, 400, "input[1]"),
        ("/v1/decisions", {"input": "a", "questions": []}, 400, "questions"),
        ("/v1/decisions", {"input": "a", "questions": [{"type": "other"}]}, 400, "questions[0].type"),
        ("/v1/decisions", {"input": "", "questions": [ASKED]}, 400, "input"),
        (
            "/v1/decisions",
            {"input": [{"role": "user", "content": [5]}], "questions": [ASKED]},
            400,
            "input[0].content[0]",
        ),
        ("/v1/decisions", {"input": [{"type": []}], "questions": [ASKED]}, 400, "input[0].type"),
        ("/v1/decisions", {"input": [CALL, {**OUTPUT, "output": 5}], "questions": [ASKED]}, 400, "input[1].output"),
        (
            "/v1/decisions",
            {"input": [CALL, {**OUTPUT, "output": [None]}], "questions": [ASKED]},
            400,
            "input[1].output[0]",
        ),
    ],
)
def test_mistakes(server: HttpServer, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = server.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_mistakes_of_system_one_are_all_listed(server: HttpServer) -> None:
    wrong = {"a": {"type": "other"}, "b": SPAM, "c": {"type": "choice"}, "d": {**SPAM, "more": 1}}
    response = server.post("/v1/systemone", {"state": "x", "questions": wrong})
    assert response.status_code == 422
    assert [each["loc"] for each in response.json()["detail"]] == [["body", "questions", name] for name in "acd"]
    assert server.post("/v1/systemone", {"state": "x", "questions": {"b": SPAM}, "other": 1}).status_code == 422


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder: Path = tmp_path_factory.mktemp("encoder")
    save("Bert", folder)
    save_modules(folder, 48, "mean", is_new=True, normalizes=True)
    with HttpServer("--dtype", "float32", "--served-model-name", "bert", model=str(folder)) as server:
        yield server


def test_an_encoder_makes_vectors_only(encoder: HttpServer) -> None:
    texts = ["w1 w2", "w3 " * 50] * 200
    reply = ask(encoder, "/v1/embeddings", input=texts)
    assert reply["data"][398]["embedding"] == ask(encoder, "/v1/embeddings", input="w1 w2")["data"][0]["embedding"]
    assert ask(encoder, "/api/embed", input="w1 w2")["embeddings"] == [reply["data"][0]["embedding"]]
    assert ask(encoder, "/v2/rerank", query="w1 w2", documents=["w9", "w1 w2"])["results"][0]["index"] == 1
    long = "w1 " * 300
    response = encoder.post("/v1/embeddings", {"input": ["w1", long]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1]")
    assert "maximum context length is 128 tokens" in response.json()["error"]["message"]
    cut = ask(encoder, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 128
    assert cut["data"][0]["embedding"] == ask(encoder, "/v1/embeddings", input="w1 " * 126)["data"][0]["embedding"]
    chat = encoder.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert chat.status_code == 400
    wrong: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "w1"},
        "/v1/decisions": {"input": "w1", "questions": [{"type": "predicate", "instructions": "w2"}]},
        "/v1/embeddings": {"input": "w1", "dimensions": 12},
    }
    for path, body in wrong.items():
        response = encoder.post(path, body)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), response.text
