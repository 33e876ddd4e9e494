"""`ModelRunner`: a bare model, for programs that need logits rather than text.

A facade alongside `LLM`, without scheduler or queue: the caller decides which tokens to compute and holds the KV
handle.

Legend: T = input tokens, V = vocabulary size.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.engine.front import ModelName, engine_args
from octavo.errors import InvalidParameterError, PromptTooLongError, UnsupportedModelError
from octavo.scheduler.block_pool import BlockPool
from octavo.tokenizer.tokenizer import Tokenizer
from octavo.worker.worker import Worker

TokenIds = Sequence[int] | torch.Tensor


class KVHandle:
    """The KV cache of one sequence. Opaque and immutable, so it can be continued any number of times.

    Its blocks are freed when the last reference is dropped.
    """

    def __init__(self, pool: BlockPool, block_ids: list[int], num_tokens: int) -> None:
        self.block_ids = block_ids
        self.num_tokens = num_tokens
        weakref.finalize(self, pool.release, block_ids)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The result of `run_model`."""

    logits: torch.Tensor  # [T, V] float32; row t predicts the token that follows input_ids[: t + 1]
    past_key_values: KVHandle


class ModelRunner:
    """A loaded model that returns logits.

        runner = ModelRunner("demo")
        output = runner.run_model(runner.tokenize("Hello"))
        output = runner.run_model([int(output.logits[-1].argmax())], output.past_key_values)

    The options are those of `octavo.config.args.EngineArgs`.

    Raises UserError: an invalid option, a model that cannot be loaded, or too little memory.
    """

    def __init__(
        self, model_name: ModelName | None = None, device: str = "auto", dtype: str | None = None, **options: Any
    ) -> None:
        config = engine_args(model_name, {"device": device, "dtype": dtype or "auto", **options}).resolve()
        if config.model.recurrent_layers:
            raise UnsupportedModelError(
                f"{config.model.model}: a handle of ModelRunner holds keys and values, and layers of this model keep "
                "a recurrent state; use LLM"
            )
        self._tokenizer = Tokenizer.from_path(config.tokenizer_path)
        self._max_model_len, self._vocab_size = config.model.max_model_len, config.model.vocab_size
        self._block_size = config.cache.block_size
        worker = Worker(config)
        worker.load_model()
        # A handle keeps its whole context: every KV group has the same blocks, including those outside a window.
        spec = worker.kv_cache_spec
        num_blocks = spec.num_bytes(worker.count_kv_blocks()) // sum(spec.bytes_per_block)
        self._groups = config.model.kv_groups
        worker.initialize_kv_cache([num_blocks] * len(self._groups))
        self._pool = BlockPool(num_blocks)
        self._model = worker.model
        self._kv_caches = [cache for cache in worker.runner.kv_caches if isinstance(cache, LayerKVCache)]
        self.device = worker.devices.device

    def run_model(self, input_ids: TokenIds, past_key_values: KVHandle | None = None) -> ModelOutput:
        """Compute `input_ids`, [T] or [1, T], as a continuation of `past_key_values`.

        Raises InvalidParameterError: no tokens, a token id outside the vocabulary, or a sequence longer than the
        context. OutOfBlocksError: too many handles are alive.
        """
        return self.run_model_batch([input_ids], [past_key_values])[0]

    @torch.inference_mode()
    def run_model_batch(
        self, batch: Sequence[TokenIds], past_key_values: Sequence[KVHandle | None] | None = None
    ) -> list[ModelOutput]:
        """Compute several sequences in one step; outputs are in input order. Raises the same errors as `run_model`."""
        past = list(past_key_values) if past_key_values is not None else [None] * len(batch)
        if len(past) != len(batch):
            raise InvalidParameterError("past_key_values", f"{len(past)} handles", f"as many as inputs ({len(batch)})")
        inputs = [self._checked(ids, handle) for ids, handle in zip(batch, past, strict=True)]
        if not inputs:
            return []
        handles = [self._extended(handle, len(ids)) for ids, handle in zip(inputs, past, strict=True)]
        starts = [0 if handle is None else handle.num_tokens for handle in past]
        tables = [handle.block_ids for handle in handles]
        step = ForwardBatch.of_sequences(inputs, starts, tables, self._block_size, self._groups, self.device)
        hidden = self._model(step, self._kv_caches)
        logits = torch.split(self._model.compute_logits(hidden), [len(ids) for ids in inputs])
        return [ModelOutput(rows, handle) for rows, handle in zip(logits, handles, strict=True)]

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a prompt, including special tokens."""
        return self._tokenizer.encode(text)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _checked(self, input_ids: TokenIds, past: KVHandle | None) -> list[int]:
        ids = torch.as_tensor(input_ids).reshape(-1).tolist()
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise InvalidParameterError("input_ids", token_id, f"token ids are 0 to {self._vocab_size - 1}")
        num_tokens = len(ids) + (past.num_tokens if past else 0)
        if not ids:
            raise InvalidParameterError("input_ids", [], "at least one token")
        if num_tokens > self._max_model_len:
            limit = f"This model's maximum context length is {self._max_model_len} tokens"
            raise PromptTooLongError("input_ids", f"{num_tokens} tokens", limit)
        return ids

    def _extended(self, past: KVHandle | None, num_new: int) -> KVHandle:
        """Return a handle with room for `num_new` more tokens: full blocks are shared, a partial one is copied."""
        num_past = past.num_tokens if past else 0
        num_shared = num_past // self._block_size
        shared = past.block_ids[:num_shared] if past else []
        num_own = -(-(num_past + num_new) // self._block_size) - num_shared
        own = self._pool.allocate(num_own, after=shared[-1] if shared else None)
        for block_id in shared:
            self._pool.acquire(block_id)
        if past and num_past % self._block_size:
            size, source, target = self._block_size, past.block_ids[num_shared], own[0]
            for tensor in (tensor for cache in self._kv_caches for tensor in cache.pools):
                tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]
        return KVHandle(self._pool, shared + own, num_past + num_new)
