"""Scores of pairs of texts: does a document fit a query? Three kinds of model answer, each in its own way.

An embedder by the cosine of two vectors; a classifier by its one output on both texts, made a probability; a decoder by
the probability of "yes" against "no" as the next token, in the prompt that Qwen3-Reranker was trained with.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from octavo.contracts.engine import ExtraInputs
from octavo.engine.front import EngineFront
from octavo.errors import InvalidParameterError, named_error
from octavo.inputs import TokensPrompt
from octavo.multimodal.placeholders import MultiModalPrompt
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

Kind = Literal["cosine", "classifier", "yes or no"]


class PairScoring:
    """The requests that score pairs, and what their answers say.

    One query is compared with every document, several with one document each. At most `max_document_tokens` of a
    document are read; -1: as many as fit; None: one that is too long is an error.

    Raises InvalidParameterError: names the text, its value and the limit. PromptTooLongError: names the document.
    """

    def __init__(
        self,
        front: EngineFront,
        queries: Sequence[str],
        documents: Sequence[str],
        instruction: str | None = None,
        max_document_tokens: int | None = None,
    ) -> None:
        self._front, self._tokenizer, self._limit = front, front.tokenizer, front.inputs.limit
        config = front.config.model.pooling
        self.kind: Kind = "yes or no" if config.ranks else "classifier" if config.num_scores else "cosine"
        self._most = max_document_tokens
        if instruction is not None and self.kind != "yes or no":
            raise InvalidParameterError("instruction", instruction, "this model's scores depend on the two texts only")
        if config.num_scores > 1:
            raise InvalidParameterError(
                "model", front.config.model.model, f"it has {config.num_scores} scores, not one"
            )
        self._pairs = _pairs(queries, documents)
        if self.kind == "cosine":
            named = {text: f"documents[{at}]" for at, text in reversed([*enumerate(documents)])}
            named |= {text: f"queries[{at}]" for at, text in reversed([*enumerate(queries)])}
            self._texts, self.names = list(named), list(named.values())  # of each prompt, the text that errors name
            self.prompts: list[object] = [self._shortened(text) for text in self._texts]
            self.params = [PoolingParams(normalize=True)] * len(self._texts)
            return
        self.names = [f"documents[{at}]" for at in range(len(self._pairs))]
        if self.kind == "classifier":
            self.prompts = [self._joined(at, *pair) for at, pair in enumerate(self._pairs)]
            self.params = [PoolingParams()] * len(self._pairs)
        else:
            labels = config.label_token_ids or tuple(map(self._word, ("yes", "no")))
            self._before, self._behind = (self._tokenizer.encode(text, False) for text in (_BEFORE, _BEHIND))
            wanted = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n"
            self.prompts = [self._asked(at, wanted, *pair) for at, pair in enumerate(self._pairs)]
            self.params = [PoolingParams(label_token_ids=labels)] * len(self._pairs)

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return the score of each pair, given the answers to all prompts. Raises OctavoError: one has failed."""
        found = [answer_of(output) for output in outputs]
        if self.kind == "cosine":
            vectors = dict(zip(self._texts, map(np.array, found), strict=True))
            return [float(vectors[query] @ vectors[document]) for query, document in self._pairs]
        logits = [answer[0] if self.kind == "classifier" else answer[0] - answer[1] for answer in found]
        return [1.0 / (1.0 + math.exp(-logit)) if logit > -700.0 else 0.0 for logit in logits]

    def _shortened(self, text: str) -> str | TokensPrompt:
        if self._most is None:
            return text
        room = self._limit.max_prompt_tokens
        most = room if self._most == -1 else min(self._most, room)
        text = self._front.inputs.pooling_rules.prompt + text
        return {"prompt_token_ids": self._tokenizer.encode_cut(text, most)}

    def _joined(self, index: int, query: str, document: str) -> MultiModalPrompt:
        """Return both texts as one prompt, with the tokens around them that the tokenizer has for pairs."""
        room = self._limit.max_prompt_tokens
        token_ids, second = self._tokenizer.encode_pair(query, document, self._document_tokens(room))
        self._check(index, len(token_ids), room)
        return MultiModalPrompt(text=None, token_ids=token_ids, extra_inputs=ExtraInputs(second_text=second))

    def _asked(self, index: int, wanted: str, query: str, document: str) -> TokensPrompt:
        room = self._limit.max_prompt_tokens - len(self._before) - len(self._behind)
        head = f"{wanted}<Query>: {query}\n<Document>: "
        body = self._tokenizer.encode_plain(head + document)
        if self._most is not None:
            num_head = len(self._tokenizer.encode_plain(head))
            most = room if self._most == -1 else min(room, num_head + self._most)
            body = body[:most]
        self._check(index, len(body), room)
        return {"prompt_token_ids": [*self._before, *body, *self._behind]}

    def _document_tokens(self, room: int) -> tuple[int | None, int]:
        """Return the most tokens of a document and of a whole pair."""
        if self._most is None:
            return None, 1 << 30
        return None if self._most == -1 else self._most, room

    def _check(self, index: int, num_tokens: int, room: int) -> None:
        if num_tokens > room:
            raise self._limit.error(f"{num_tokens} tokens", f"documents[{index}]")

    def _word(self, word: str) -> int:
        found = self._tokenizer.encode(word, False)
        if len(found) != 1:
            raise InvalidParameterError("pooler", "rerank", f"{word!r} is not one token of this model")
        return found[0]


def answer_of(output: RequestOutput) -> list[float]:
    """Return what a pooled request was answered. Raises OctavoError: it failed, or was aborted."""
    [sample] = output.outputs
    if output.embedding is None:
        raise named_error(sample.error_type or "RequestError", sample.error or "the request was aborted")
    return output.embedding


def _pairs(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    for name, texts in (("queries", queries), ("documents", documents)):
        if isinstance(texts, str) or not texts:
            raise InvalidParameterError(name, texts, "at least one text")
        for index, text in enumerate(texts):
            if not text:
                raise InvalidParameterError(f"{name}[{index}]", text, "a text that is not empty")
    if len(queries) == 1:
        return [(queries[0], document) for document in documents]
    if len(queries) != len(documents):
        limit = f"as many as there are queries ({len(queries)}), or one query for all"
        raise InvalidParameterError("documents", f"{len(documents)} texts", limit)
    return list(zip(queries, documents, strict=True))
