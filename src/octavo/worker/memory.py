"""How much memory there is for KV blocks. Arithmetic before loading, measurement after.

Everything is in bytes. The budget is `gpu_memory_utilization` of the device's whole memory, whatever the device, but
never more than what is free: on a shared machine others were there first.
"""

import logging
from dataclasses import replace

from octavo.config.engine import CacheConfig
from octavo.config.model import ModelConfig, MoEConfig
from octavo.config.parallel import RankPlace, Stage
from octavo.contracts.kv_cache import KVCacheSpec, MemoryReport
from octavo.distributed.shares import HeadShare, Share
from octavo.errors import InsufficientMemoryError

logger = logging.getLogger(__name__)

# Kept free beside everything that is accounted for: allocator slack, thread stacks, Python.
_RESERVE_BYTES = 128 << 20
# Blocks beyond what `max_num_seqs` full-length requests can hold only serve the prefix cache; as many again for it.
_PREFIX_CACHE_FACTOR = 2


def part_of_rank(model: ModelConfig, place: RankPlace, *, deals_experts: bool = False) -> ModelConfig:
    """Return the numbers of what one rank holds, as if that were a model: all arithmetic below can be about it."""
    rank, size = place.tp_rank, place.tp_size
    heads = HeadShare.of(model.num_heads, model.num_kv_heads, rank, size)
    return replace(
        model,
        num_heads=heads.query.size,
        num_kv_heads=heads.kv.size,
        intermediate_size=Share.of_features(model.intermediate_size, rank, size).size,
        vocab_size=Share.of_features(model.vocab_size, rank, size).size,
        moe=model.moe and (_dealt_experts if deals_experts else _sliced_experts)(model.moe, rank, size),
    )


def _dealt_experts(moe: MoEConfig, rank: int, size: int) -> MoEConfig:
    """Whole experts; a token brings no more work to one rank than to a rank alone. Rows of routers go with experts."""
    return replace(moe, num_experts=Share.of(moe.num_experts, rank, size).size)


def _sliced_experts(moe: MoEConfig, rank: int, size: int) -> MoEConfig:
    shared = moe.shared_intermediate_size
    return replace(
        moe,
        intermediate_size=Share.of_features(moe.intermediate_size, rank, size).size,
        shared_intermediate_size=None if shared is None else Share.of_features(shared, rank, size).size,
    )


def activation_bytes(
    model: ModelConfig, stage: Stage, max_num_batched_tokens: int, max_num_seqs: int, dtype_bytes: int
) -> int:
    """Return an upper estimate of what one step holds on a stage beside weights and KV.

    The widest moment of a layer: residual, normed input, gate and up, their product; then float32 logits of the rows
    that sample, in the slices that the LM head and the sampler work in (64 rows, four copies). Of experts, all that a
    token has chosen are held at once: input, gate and up, their product, answer. Between stages, what comes in and what
    goes out.
    """
    width = 3 * model.hidden_size + 3 * model.intermediate_size
    if model.moe is not None:
        inner = model.moe.top_k * model.moe.intermediate_size + (model.moe.shared_intermediate_size or 0)
        num_choices = model.moe.top_k + (model.moe.shared_intermediate_size is not None)
        width = max(width, (3 + 2 * num_choices) * model.hidden_size + 3 * inner)
    if not stage.is_whole:
        width += 4 * model.hidden_size
    logits = min(64, max_num_seqs) * model.vocab_size * 4 * 4 * stage.is_last
    return max_num_batched_tokens * width * dtype_bytes + logits


def check_weights_fit(model: ModelConfig, num_weights: int, weights_bytes: int, budget_bytes: int) -> None:
    """Refuse before loading.

    Raises:
        InsufficientMemoryError: with both numbers.
    """
    if weights_bytes > budget_bytes:
        raise InsufficientMemoryError(
            f"{model.model}: {num_weights / 1e6:,.0f} M weights in {model.dtype} need "
            f"{gib(weights_bytes)}, but Octavo may use {gib(budget_bytes)} of this device's memory; "
            "raise gpu_memory_utilization or take a smaller model"
        )


def choose_num_blocks(
    model: ModelConfig, cache: CacheConfig, spec: KVCacheSpec, memory: MemoryReport, max_num_seqs: int
) -> int:
    """Return how many KV blocks to make, and log what that is worth.

    Raises:
        InsufficientMemoryError: when not even one request of `max_model_len` tokens fits.
    """
    blocks_per_request = -(-model.max_model_len // spec.block_size)
    most_useful = _PREFIX_CACHE_FACTOR * max_num_seqs * blocks_per_request
    num_blocks = cache.num_kv_blocks or min(memory.kv_bytes // spec.bytes_per_block, most_useful)
    num_tokens = num_blocks * spec.block_size
    if num_blocks < blocks_per_request:
        raise InsufficientMemoryError(
            f"max_model_len={model.max_model_len}: one such request needs {blocks_per_request} KV blocks of "
            f"{spec.block_size} tokens ({gib(blocks_per_request * spec.bytes_per_block)}), but there is room for "
            f"{num_blocks} ({num_tokens} tokens): budget {gib(memory.budget_bytes)}, weights "
            f"{gib(memory.weights_bytes)}, activations {gib(memory.activation_bytes)}; "
            f"set max_model_len to at most {num_tokens}, or give more memory"
        )
    logger.info(
        "KV memory: %d blocks of %d tokens, %s: %s tokens, or %.1f requests of the full %d tokens",
        num_blocks,
        spec.block_size,
        gib(num_blocks * spec.bytes_per_block),
        f"{num_tokens:,}",
        num_tokens / model.max_model_len,
        model.max_model_len,
    )
    return num_blocks


def kv_budget(memory_budget: int, free_now: int, weights_bytes: int, activations: int) -> int:
    """Return the bytes that are left for KV once the weights are loaded; never negative."""
    by_share = memory_budget - weights_bytes - activations
    by_free = free_now - activations - _RESERVE_BYTES
    return max(0, min(by_share, by_free))


def gib(num_bytes: int) -> str:
    """Return a size for people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
