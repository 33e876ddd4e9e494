"""`/v1/embeddings`: the vectors of `LLM.embed`, in the order of the inputs, in two encodings, with typed mistakes."""

import base64
from typing import Any

import numpy as np
import pytest
from tests.server.http_server import HttpServer

from octavo import LLM


def embeddings(server: HttpServer, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_they_are_those_of_the_library(server: HttpServer) -> None:
    texts = ["Hello", "What is a block?", "Hello"]
    reply = embeddings(server, input=texts)
    assert (reply["object"], reply["model"]) == ("list", "demo")
    assert [(each["object"], each["index"]) for each in reply["data"]] == [("embedding", n) for n in range(3)]
    llm = LLM("demo")
    outputs = llm.embed(texts, use_tqdm=False)
    assert [each["embedding"] for each in reply["data"]] == [output.embedding for output in outputs]
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    ids = outputs[1].prompt_token_ids
    assert embeddings(server, input=ids)["data"][0]["embedding"] == outputs[1].embedding
    assert embeddings(server, input=[ids, ids])["data"][1]["embedding"] == outputs[1].embedding
    last = embeddings(server, input=ids[-2:])["data"]
    assert embeddings(server, input=ids, truncate_prompt_tokens=2)["data"] == last
    assert embeddings(server, input="What is a block?", truncate_prompt_tokens=2)["data"] == last
    packed = embeddings(server, input="Hello", encoding_format="base64")["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(packed), dtype="<f4")
    assert vector.tolist() == np.array(outputs[0].embedding, dtype="<f4").tolist()
    assert np.linalg.norm(vector) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": [1, "a"]}, 400, "input"),
        ({"input": [10**6]}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": [1] * 100_000}, 400, "input"),
        ({"input": "a", "dimensions": 8}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "timeout": 0}, 400, "timeout"),
        ({"input": "a", "priority": 9}, 400, "priority"),
        ({"input": "a", "model": "other"}, 404, "model"),
    ],
)
def test_mistakes(server: HttpServer, fields: dict[str, Any], status: int, param: str) -> None:
    response = server.post("/v1/embeddings", fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
