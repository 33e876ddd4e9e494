"""Vectors and ranks by other projects' clients, unchanged: of a chat model, whose last state is pooled."""

from typing import Any

import cohere
import litellm
import ollama
import pytest
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI
from tests.clients.words import MODEL
from tests.server.http_server import HttpServer

QUERY = "What is a block?"
TEXTS = ["A block holds tokens.", "It rains in Rome.", QUERY]


@pytest.fixture
def vectors(client: OpenAI) -> list[Any]:
    """What openai-python gets."""
    made = client.embeddings.create(model=MODEL, input=TEXTS)
    return [pytest.approx(each.embedding, abs=1e-6) for each in made.data]


def test_langchain(server: HttpServer, vectors: list[Any]) -> None:
    options: Any = {"api_key": "unused", "max_retries": 0, "check_embedding_ctx_length": False}  # else cl100k's ids
    made = OpenAIEmbeddings(model=MODEL, base_url=f"{server.url}/v1", **options)
    assert made.embed_documents(TEXTS) == vectors
    assert made.embed_query(QUERY) == vectors[2]


def test_litellm(server: HttpServer, vectors: list[Any]) -> None:
    base: Any = {"api_base": f"{server.url}/v1", "api_key": "unused"}
    reply = litellm.embedding(model=f"openai/{MODEL}", input=TEXTS, encoding_format="float", **base)
    assert [each["embedding"] for each in reply.data] == vectors
    assert reply.usage.prompt_tokens > 0


@pytest.mark.parametrize("provider", ["hosted_vllm", "cohere", "jina_ai"])
def test_ranks_by_litellm(server: HttpServer, provider: str) -> None:
    options: Any = {"query": QUERY, "documents": TEXTS, "top_n": 2, "api_base": server.url, "api_key": "unused"}
    ranked = litellm.rerank(model=f"{provider}/{MODEL}", **options)
    assert ranked.results[0]["index"] == 2
    assert len(ranked.results) == 2


@pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
def test_ranks_by_cohere(server: HttpServer, kind: Any) -> None:
    made = kind(api_key="unused", base_url=server.url)
    ranked = made.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
    assert ranked.results[0].index == 2
    assert ranked.results[0].relevance_score == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(cohere.NotFoundError, match="other"):
        made.rerank(model="other", query=QUERY, documents=TEXTS)


def test_ollama(server: HttpServer, vectors: list[Any]) -> None:
    with ollama.Client(host=server.url) as made:
        assert made.embed(MODEL, TEXTS).embeddings == vectors
        assert made.embeddings(MODEL, QUERY).embedding == vectors[2]
