"""`VectorsService`: pairs of texts to scores, texts to what the model makes of them, by pooled requests."""

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial

from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.ranking import PairScoring
from octavo.errors import UserError
from octavo.sampling_params import PoolingParams
from octavo.server.http.errors import as_api_error, bad_request
from octavo.server.openai.embeddings import (
    MAX_INPUTS,
    VectorsRequest,
    answers_to,
    check_truncation,
    encoded,
    numbers_of,
    prepare_inputs,
    usage_of,
)
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import Warn
from octavo.server.openai.service import MANY_PROMPTS, OpenAICompatibleService, prepared
from octavo.server.vectors.protocol import (
    DocumentText,
    PooledData,
    PoolingReply,
    PoolingRequest,
    RankedDocument,
    RerankReply,
    RerankRequest,
    Score,
    ScoreReply,
    ScoreRequest,
)

Prepared = tuple[PairScoring, list[ProcessedRequest]]


class VectorsService:
    """Its methods are as those of `OpenAICompatibleService`."""

    def __init__(self, service: OpenAICompatibleService, path: str) -> None:
        self._service, self._path = service, path

    async def rerank(self, request: RerankRequest, warn: Warn, is_large: bool) -> RerankReply:
        """Order documents by how well they fit a query."""
        model, texts = self._service.models.find(request.model), request.texts
        if request.top_n is not None and request.top_n < 1:
            raise bad_request(f"top_n={request.top_n}: at least 1", "top_n")
        if len(texts) > MAX_INPUTS:
            raise bad_request(f"{len(texts)} documents: at most {MAX_INPUTS} per request.", "documents")
        most = request.truncate_prompt_tokens if request.max_tokens_per_doc is None else request.max_tokens_per_doc
        names = _RERANK_NAMES
        if request.max_tokens_per_doc is not None:
            names = names | {"truncate_prompt_tokens": "max_tokens_per_doc"}
        work = partial(_pairs, model, request, [request.query], texts, request.instruction, most, names)
        scoring, prompts = await prepared(work, request, is_large or len(texts) > MANY_PROMPTS)
        scores = await _scores(scoring, prompts, model)
        shows = self._path != "/v2/rerank" if request.return_documents is None else request.return_documents
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: request.top_n]
        usage = usage_of(prompts)
        return RerankReply(
            id=f"rerank-{uuid.uuid4().hex}",
            model=model.card.id,
            results=[
                RankedDocument(
                    index=index,
                    relevance_score=scores[index],
                    document=DocumentText(text=texts[index]) if shows else None,
                )
                for index in order
            ],
            meta={
                "api_version": {"version": "2" if self._path == "/v2/rerank" else "1"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": 0},
            },
            usage=usage,
        )

    async def score(self, request: ScoreRequest, warn: Warn, is_large: bool) -> ScoreReply:
        """Score pairs of texts: by the model if it ranks, else by the cosine of their vectors."""
        model = self._service.models.find(request.model)
        first, second = ([text] if isinstance(text, str) else text for text in (request.text_1, request.text_2))
        for name, texts in (("text_1", first), ("text_2", second)):
            if len(texts) > MAX_INPUTS:
                raise bad_request(f"{len(texts)} texts: at most {MAX_INPUTS} per request.", name)
        most = request.truncate_prompt_tokens
        work = partial(_pairs, model, request, first, second, request.instruction, most, _SCORE_NAMES)
        scoring, prompts = await prepared(work, request, is_large or request.num_inputs > MANY_PROMPTS)
        scores = await _scores(scoring, prompts, model)
        return ScoreReply(
            id=f"score-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model.card.id,
            data=[Score(index=index, score=score) for index, score in enumerate(scores)],
            usage=usage_of(prompts),
        )

    async def pooling(self, request: PoolingRequest, warn: Warn, is_large: bool) -> PoolingReply:
        """Return what the model makes of each input: a vector, or a classifier's outputs."""
        model = self._service.models.find(request.model)
        rules = model.engine.front.inputs.pooling_rules
        rules.check_dimensions(request.dimensions)
        params = PoolingParams(normalize=request.normalize, dimensions=request.dimensions)
        work = partial(prepare_inputs, request, request.input, params, model)
        prompts = await prepared(work, request, is_large or request.num_inputs > MANY_PROMPTS)
        outputs = await answers_to(prompts, model)
        return PoolingReply(
            id=f"pool-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model.card.id,
            data=[
                PooledData(index=index, data=encoded(numbers_of(output), request.encoding_format))
                for index, output in enumerate(outputs)
            ],
            usage=usage_of(prompts),
        )


# What the wire calls the fields of `PairScoring`.
_RERANK_NAMES = {"queries": "query", "queries[0]": "query"}
_SCORE_NAMES = {"queries": "text_1", "documents": "text_2"}


def _pairs(
    model: ServedModel,
    request: VectorsRequest,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None,
    most: int | None,
    names: Mapping[str, str],
) -> Prepared:
    """Tokenize and validate all pairs. Raises ApiError, UserError."""
    check_truncation(most, names.get("truncate_prompt_tokens", "truncate_prompt_tokens"))
    try:
        scoring = PairScoring(model.engine.front, queries, documents, instruction, most)
    except UserError as error:
        field = getattr(error, "field", "")
        raise as_api_error(error, {field: _wire_name(field, names)}) from error
    processed = []
    for prompt, params, name in zip(scoring.prompts, scoring.params, scoring.names, strict=True):
        try:
            processed.append(model.process(prompt, params, **request.options))
        except UserError as error:
            raise as_api_error(error, {"prompt": _wire_name(name, names)}) from error
    return scoring, processed


def _wire_name(field: str, names: Mapping[str, str]) -> str:
    base, bracket, rest = field.partition("[")
    return names.get(field) or f"{names.get(base, base)}{bracket}{rest}"


async def _scores(scoring: PairScoring, prompts: Sequence[ProcessedRequest], model: ServedModel) -> list[float]:
    outputs = await answers_to(prompts, model)
    for output in outputs:
        numbers_of(output)  # raises what went wrong in the API's shape
    return scoring.scores(outputs)
