"""How much memory there is for KV blocks. Arithmetic before loading, measurement after.

Everything is in bytes. The budget is `gpu_memory_utilization` of the device's whole memory, whatever the device, but
never more than what is free: on a shared machine others were there first.
"""

import logging
from collections import Counter
from dataclasses import replace

from octavo.config.engine import CacheConfig
from octavo.config.model import ModelConfig, MoEConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.kv_cache import KVCacheSpec, MemoryReport
from octavo.distributed.shares import HeadShare, Share
from octavo.errors import InsufficientMemoryError
from octavo.kernels.quantization import Quantization

logger = logging.getLogger(__name__)

# Kept free beside everything that is accounted for: allocator slack, thread stacks, Python.
_RESERVE_BYTES = 128 << 20
# Blocks beyond what `max_num_seqs` full-length requests can hold only serve the prefix cache; as many again for it.
_PREFIX_CACHE_FACTOR = 2


def part_of_rank(model: ModelConfig, place: RankPlace) -> ModelConfig:
    """Return the numbers of what one rank holds, as if that were a model: all arithmetic below can be about it."""
    rank, size = place.tp_rank, place.tp_size
    heads = HeadShare.of(model.num_heads, model.num_kv_heads, rank, size)
    return replace(
        model,
        num_heads=heads.query.size,
        num_kv_heads=heads.kv.size,
        intermediate_size=Share.of_features(model.intermediate_size, rank, size).size,
        vocab_size=Share.of_features(model.vocab_size, rank, size).size,
        moe=model.moe and _experts_of_rank(model.moe, rank, size),
    )


def _experts_of_rank(moe: MoEConfig, rank: int, size: int) -> MoEConfig:
    shared = moe.shared_intermediate_size
    return replace(
        moe,
        intermediate_size=Share.of_features(moe.intermediate_size, rank, size).size,
        shared_intermediate_size=None if shared is None else Share.of_features(shared, rank, size).size,
    )


def count_parameters(model: ModelConfig) -> int:
    """Return the number of weights of a decoder, from its configuration alone."""
    query = model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (query + 2 * key) + query * model.hidden_size
    attention += (query + 2 * key) * model.attention_bias + model.hidden_size * model.attention_out_bias
    norms = 2 * model.hidden_size + 2 * model.head_dim * model.qk_norm
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * (attention + norms) + _count_in_mlps(model) + embeddings + model.hidden_size


def _count_in_mlps(model: ModelConfig) -> int:
    """Return the weights of all MLPs and mixtures of experts."""
    dense = 3 * model.hidden_size * model.intermediate_size
    dense += (2 * model.intermediate_size + model.hidden_size) * model.mlp_bias
    if model.moe is None:
        return model.num_layers * dense
    moe, num_sparse = model.moe, sum(model.moe.is_sparse)
    sparse = moe.num_experts * (model.hidden_size + 3 * model.hidden_size * moe.intermediate_size)  # routers, experts
    if moe.shared_intermediate_size is not None:
        sparse += model.hidden_size + 3 * model.hidden_size * moe.shared_intermediate_size
    return num_sparse * sparse + (model.num_layers - num_sparse) * dense


def weights_bytes(model: ModelConfig, dtype_bytes: int, *, packing_copies: bool) -> int:
    """Return what the weights take in memory; a tied logits head counts twice where packing copies it."""
    num_copied = model.vocab_size * model.hidden_size if packing_copies and model.tie_word_embeddings else 0
    return (count_parameters(model) + num_copied) * dtype_bytes


def quantized_weights_bytes(model: ModelConfig, dtype_bytes: int, quantization: Quantization) -> int:
    """Return the same where linear maps become integers. The embedding stays as it is beside the logits head's copy."""
    maps = _maps_of_layers(model)
    in_integers = sum(count * num_outputs * in_size for count, num_outputs, in_size in maps)
    if not model.tie_word_embeddings:
        in_integers += model.vocab_size * model.hidden_size
    integers = sum(count * quantization.linear.num_bytes(*shape) for count, *shape in maps)
    integers += quantization.logits.num_bytes(model.vocab_size, model.hidden_size)
    return (count_parameters(model) - in_integers) * dtype_bytes + integers


def _maps_of_layers(model: ModelConfig) -> list[tuple[int, int, int]]:
    """Return (how many, outputs, inputs) of all linear maps in layers, but for routers: those stay as they are."""
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    maps = [(model.num_layers, query + 2 * key, hidden), (model.num_layers, hidden, query)]
    mlps = {model.intermediate_size: model.num_layers}  # how many, by size
    if (moe := model.moe) is not None:
        num_sparse = sum(moe.is_sparse)
        mlps = Counter({model.intermediate_size: model.num_layers - num_sparse})
        mlps[moe.intermediate_size] += num_sparse * moe.num_experts
        mlps[moe.shared_intermediate_size or 0] += num_sparse
    for size, count in mlps.items():
        maps += [(count, 2 * size, hidden), (count, hidden, size)]
    return maps


def activation_bytes(model: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int, dtype_bytes: int) -> int:
    """Return an upper estimate of what one step holds beside weights and KV.

    The widest moment of a layer: residual, normed input, gate and up, their product; then float32 logits of the rows
    that sample, in the slices that the LM head and the sampler work in (64 rows, four copies). Of experts, all that a
    token has chosen are held at once: input, gate and up, their product, answer.
    """
    width = 3 * model.hidden_size + 3 * model.intermediate_size
    if model.moe is not None:
        inner = model.moe.top_k * model.moe.intermediate_size + (model.moe.shared_intermediate_size or 0)
        num_choices = model.moe.top_k + (model.moe.shared_intermediate_size is not None)
        width = max(width, (3 + 2 * num_choices) * model.hidden_size + 3 * inner)
    logits = min(64, max_num_seqs) * model.vocab_size * 4 * 4
    return max_num_batched_tokens * width * dtype_bytes + logits


def check_weights_fit(model: ModelConfig, weights_bytes: int, budget_bytes: int) -> None:
    """Refuse before loading.

    Raises:
        InsufficientMemoryError: with both numbers.
    """
    if weights_bytes > budget_bytes:
        raise InsufficientMemoryError(
            f"{model.model}: {count_parameters(model) / 1e6:,.0f} M weights in {model.dtype} need "
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
