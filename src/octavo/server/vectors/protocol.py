"""Wire types of rerank, score and pooling, as Cohere, Jina and vLLM have them; and their part of the OpenAPI page."""

from typing import Any, Literal

import msgspec

from octavo.server.openai.embeddings import MAX_INPUTS, InputsRequest, VectorsReply, VectorsRequest

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # Jina's, Cohere's and vLLM's
SCORE_PATHS = ("/score", "/v1/score")


class DocumentText(msgspec.Struct, frozen=True, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(VectorsRequest, kw_only=True):
    """`POST /v1/rerank` and its other names. `max_tokens_per_doc` cuts documents, which may be an error otherwise."""

    query: str
    documents: list[str | DocumentText]
    top_n: int | None = None
    return_documents: bool | None = None  # null: as Jina, except in Cohere's second version
    max_tokens_per_doc: int | None = None
    instruction: str | None = None

    @property
    def num_inputs(self) -> int:
        return max(1, min(len(self.documents), MAX_INPUTS))

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document's place in the request, and how well it fits."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankReply(VectorsReply, frozen=True, kw_only=True):
    """The documents, those that fit best first."""

    id: str
    model: str
    results: list[RankedDocument]
    meta: dict[str, Any]  # as Cohere's


class ScoreRequest(VectorsRequest, kw_only=True):
    """`POST /score`: one text against one or many, or as many pairs as there are texts in both."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None

    @property
    def num_inputs(self) -> int:
        given = (1 if isinstance(text, str) else len(text) for text in (self.text_1, self.text_2))
        return max(1, min(max(given), MAX_INPUTS))


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(VectorsReply, frozen=True, kw_only=True):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]


class PoolingRequest(InputsRequest, kw_only=True):
    """`POST /pooling`: what the model makes of each input: a vector, or a classifier's outputs."""

    normalize: bool | None = None


class PooledData(msgspec.Struct, frozen=True, kw_only=True):
    """Of one input: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingReply(VectorsReply, frozen=True, kw_only=True):
    """In the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledData]
