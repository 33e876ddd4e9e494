"""A rank's memory: weights counted and checked before loading, the rest measured after, and KV blocks that fit.

Everything is in bytes. The budget is `gpu_memory_utilization` of the device's total memory, on any device, but never
more than what is free: on a shared machine other processes may already hold memory.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs
from torch import nn

from octavo.attention.torch_sdpa import SdpaAttention
from octavo.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from octavo.config.layers import (
    AttentionSpec,
    DenseSpec,
    FeedForward,
    GatedDeltaSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    RecurrentSpec,
    ShortConvSpec,
)
from octavo.config.model import ModelConfig
from octavo.config.parallel import RankPlace, Stage
from octavo.contracts.kv_cache import KVCacheSpec, capacity_tokens
from octavo.device.base import DeviceMemory
from octavo.device.manager import DeviceManager
from octavo.distributed.groups import HeadShare, ParallelGroups, Share
from octavo.errors import InsufficientMemoryError
from octavo.kernels.reference import Kernels
from octavo.layers.context import BuildContext
from octavo.layers.quant.registry import make_schemes
from octavo.layers.rotary import peak_table_bytes
from octavo.layers.weight_owner import WeightOwner
from octavo.lora.pool import slot_bytes
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model

logger = logging.getLogger(__name__)

# Kept free in addition to everything accounted for: allocator slack, thread stacks, Python.
_RESERVE_BYTES = 128 << 20
# Blocks beyond those of `max_num_seqs` full-length requests only serve the prefix cache, which gets as many again.
_PREFIX_CACHE_FACTOR = 2
META = torch.device("meta")


def empty_model(model: ModelConfig, groups: ParallelGroups | None = None, device: torch.device = META) -> CausalLM:
    """Build the whole model, or a rank's shard of it, without weights; on the meta device: 10 ms for 28 layers."""
    kernels, dtype = Kernels(), getattr(torch, model.dtype)
    context = BuildContext(
        kernels=kernels,
        attention=SdpaAttention(kernels, dtype),
        dtype=dtype,
        device=device,
        groups=groups or ParallelGroups(),
        schemes=make_schemes(model.quantization),
    )
    return initialize_model(model, context)


def num_weights(part: nn.Module) -> int:
    """Return the number of weights of a model or module on a rank. A shared table counts once."""
    return sum(owner.num_weights for owner in part.modules() if isinstance(owner, WeightOwner))


def weights_bytes(part: nn.Module) -> int:
    """Return their memory, each in the format that its layer's scheme and kernels store."""
    return sum(owner.num_bytes for owner in part.modules() if isinstance(owner, WeightOwner))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory measured before the KV pool is allocated, in bytes."""

    budget_bytes: int  # gpu_memory_utilization of the total, less if others already use it
    weights_bytes: int
    activation_bytes: int  # peak of one step beyond the weights
    graph_bytes: int = 0  # of captured graphs
    kv_bytes: int  # left for KV blocks


def sharded_config(model: ModelConfig, place: RankPlace, *, is_expert_parallel: bool = False) -> ModelConfig:
    """Return a rank's shard as a model config of its own, for the arithmetic below."""
    rank, size = place.tp_rank, place.tp_size
    return replace(
        model,
        layers=tuple(_shard(layer, rank, size, is_expert_parallel=is_expert_parallel) for layer in model.layers),
        vocab_size=Share.of_features(model.vocab_size, rank, size).size,
    )


def _shard(layer: LayerSpec, rank: int, size: int, *, is_expert_parallel: bool) -> LayerSpec:
    after = layer.feed_forward
    if after is not None:
        after = _shard_feed_forward(after, rank, size, is_expert_parallel=is_expert_parallel)
    mixer, beside = (None if each is None else _shard_mixer(each, rank, size) for each in (layer.mixer, layer.beside))
    return LayerSpec(mixer, after, beside)


def _shard_mixer(mixer: Mixer, rank: int, size: int) -> Mixer:
    if isinstance(mixer, GatedDeltaSpec):
        heads = HeadShare.of(mixer.num_value_heads, mixer.num_key_heads, rank, size)
        mixer = mixer.with_heads(heads.kv.size, heads.query.size)
    elif isinstance(mixer, Mamba2Spec):
        heads = HeadShare.of(mixer.num_heads, mixer.num_groups, rank, size)
        mixer = mixer.with_heads(heads.kv.size, heads.query.size)
    elif isinstance(mixer, ShortConvSpec):
        mixer = structs.replace(mixer, num_channels=Share.of_features(mixer.num_channels, rank, size).size)
    elif isinstance(mixer, AttentionSpec):
        heads = HeadShare.of(mixer.num_heads, mixer.num_kv_heads, rank, size)
        mixer = structs.replace(mixer, num_heads=heads.query.size, num_kv_heads=heads.kv.size)
    return mixer


def _shard_feed_forward(spec: FeedForward, rank: int, size: int, *, is_expert_parallel: bool) -> FeedForward:
    def part(of: int) -> int:
        return Share.of_features(of, rank, size).size

    if isinstance(spec, DenseSpec):
        return structs.replace(spec, intermediate_size=part(spec.intermediate_size))
    if is_expert_parallel:
        # Whole experts; a token never causes more work on a rank than on a single one. Router rows go with experts.
        return structs.replace(spec, num_experts=Share.of(spec.num_experts, rank, size).size)
    shared, beside = spec.shared_intermediate_size, spec.beside
    return structs.replace(
        spec,
        intermediate_size=part(spec.intermediate_size),
        shared_intermediate_size=None if shared is None else part(shared),
        beside=None if beside is None else structs.replace(beside, intermediate_size=part(beside.intermediate_size)),
    )


def activation_bytes(model: ModelConfig, stage: Stage, limits: SchedulerConfig, dtype_bytes: int) -> int:
    """Return an upper bound on the memory of one step on a stage, in addition to weights and KV.

    The peak of a layer: residual, normed input, gate and up, their product, or what latent attention makes of queries;
    then float32 logits of the rows that sample, in the slices used by the LM head and the sampler (64 rows, four
    copies). All experts of a token are held at once: input, gate and up, their product, output. Between stages,
    incoming and outgoing tensors.
    """
    layers, size = [model.layers[layer] for layer in stage.layers], model.hidden_size
    width = max(
        max(
            3 * size if each.feed_forward is None else _inner_width(each.feed_forward, size),
            sum(_mixing_width(mixer, size) for mixer in each.mixers),
        )
        for each in layers
    )
    if not stage.is_whole:
        width += 4 * model.hidden_size
    if (inputs := model.token_inputs) is not None:  # of all layers, and what they are made from
        width += 4 * model.num_layers * inputs.size
    logits = min(64, limits.max_num_seqs) * model.vocab_size * 4 * 4 * stage.is_last
    return limits.max_num_batched_tokens * width * dtype_bytes + logits


def _mixing_width(spec: Mixer, size: int) -> int:
    """Return the same of a mixer whose queries are wider than the hidden size: twice, with their working copies."""
    if isinstance(spec, RecurrentSpec):
        return 3 * size + 2 * spec.input_size
    if spec.latent is None:
        return 0
    latent = spec.latent
    return 3 * size + 2 * spec.num_heads * (latent.key_size + latent.rotary_size + latent.size + latent.rank)


def _inner_width(spec: FeedForward, size: int) -> int:
    """Return the elements of a token that are alive at the peak."""
    if isinstance(spec, DenseSpec):
        return 3 * size + 3 * spec.intermediate_size
    inner = spec.top_k * spec.intermediate_size + (spec.shared_intermediate_size or 0)
    num_choices = spec.top_k + (spec.shared_intermediate_size is not None)
    beside = 0 if spec.beside is None else size  # what the MLP has left when experts begin
    return (3 + 2 * num_choices) * size + 3 * inner + beside


def check_weights_fit(model: ModelConfig, num_weights: int, weights_bytes: int, budget_bytes: int) -> None:
    """Check before loading. Raises InsufficientMemoryError."""
    if weights_bytes > budget_bytes:
        raise InsufficientMemoryError(
            f"{model.model}: {num_weights / 1e6:,.0f} M weights in {model.dtype} need "
            f"{gib(weights_bytes)}, but Octavo may use {gib(budget_bytes)} of this device's memory; "
            "raise gpu_memory_utilization or use a smaller model"
        )


def check_length_fits(model: ModelConfig, budget_bytes: int) -> None:
    """Check before building the model, which computes rotary tables. Raises InsufficientMemoryError."""
    table_bytes = max((peak_table_bytes(table.width, model.max_model_len) for table in model.rotary), default=0)
    if table_bytes > budget_bytes:
        raise InsufficientMemoryError(
            f"max_model_len={model.max_model_len}: the table of its rotary angles needs {gib(table_bytes)}, "
            f"but Octavo may use {gib(budget_bytes)} of this device's memory; lower max_model_len"
        )


def choose_num_blocks(
    model: ModelConfig, cache: CacheConfig, spec: KVCacheSpec, memory: MemoryReport, limits: SchedulerConfig
) -> list[int]:
    """Return how many KV blocks of each group to allocate, and log the capacity.

    The groups' shares maximize the number of requests of `max_model_len` tokens that fit. Raises
    InsufficientMemoryError: not even one request of `max_model_len` tokens fits.
    """

    def peak_blocks(num_tokens: int) -> list[int]:  # of each group, held by a request of `num_tokens`
        chunk = limits.max_num_batched_tokens
        return [of.group.peak_blocks(num_tokens, spec.block_size, chunk) for of in spec.groups]

    def divided(peaks: list[int]) -> list[int]:  # in proportion to what one request needs
        if cache.num_kv_blocks:  # applies to each group
            return [cache.num_kv_blocks] * len(peaks)
        if model.encoder is not None:  # whose blocks take no memory: they count tokens
            return [limits.max_num_seqs * peak for peak in peaks]
        return [memory.kv_bytes * peak // spec.num_bytes(peaks) for peak in peaks]

    def is_too_long(num_tokens: int) -> bool:
        peaks = peak_blocks(num_tokens)
        return any(count < peak for count, peak in zip(divided(peaks), peaks, strict=True))

    peaks = peak_blocks(model.max_model_len)
    num_blocks = divided(peaks)
    if is_too_long(model.max_model_len):
        longest = bisect_left(range(1, model.max_model_len + 1), True, key=is_too_long)
        raise InsufficientMemoryError(
            f"max_model_len={model.max_model_len}: one such request needs {_listed(spec, peaks)} "
            f"({gib(spec.num_bytes(peaks))}), but there is room for "
            f"{_listed(spec, num_blocks)}: budget {gib(memory.budget_bytes)}, weights "
            f"{gib(memory.weights_bytes)}, activations {gib(memory.activation_bytes)}; "
            f"set max_model_len to at most {longest}, or give more memory"
        )
    useful = [_PREFIX_CACHE_FACTOR * limits.max_num_seqs * peak for peak in peaks]
    if not cache.num_kv_blocks:
        num_blocks = [min(count, most) for count, most in zip(num_blocks, useful, strict=True)]
    num_tokens = capacity_tokens(
        [of.group for of in spec.groups], num_blocks, block_size=spec.block_size, max_model_len=model.max_model_len,
        max_chunk=limits.max_num_batched_tokens,
    )  # fmt: skip
    logger.info(
        "KV memory: %s, %s: %s tokens, or %.1f requests of the full %d tokens",
        _listed(spec, num_blocks),
        gib(spec.num_bytes(num_blocks)),
        f"{num_tokens:,}",
        num_tokens / model.max_model_len,
        model.max_model_len,
    )
    return num_blocks


def _listed(spec: KVCacheSpec, counts: list[int]) -> str:
    """Format counts of blocks; those of recurrent groups as states."""
    states = [count for count, of in zip(counts, spec.groups, strict=True) if of.group.kind == "recurrent"]
    blocks = [count for count, of in zip(counts, spec.groups, strict=True) if of.group.kind != "recurrent"]
    named = [f"{' and '.join(map(str, blocks))} blocks of {spec.block_size} tokens"] * bool(blocks)
    return " and ".join([*named, *(f"{count} recurrent states" for count in states)])


def kv_budget(memory_budget: int, free_now: int, weights_bytes: int, activations: int) -> int:
    """Return the bytes left for KV after loading the weights; never negative."""
    by_share = memory_budget - weights_bytes - activations
    by_free = free_now - activations - _RESERVE_BYTES
    return max(0, min(by_share, by_free))


def gib(num_bytes: int) -> str:
    """Format a size in human-readable units."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


class RankMemory:
    """Checks before loading that weights fit, and reports after it what is left. `part` is the rank's shard."""

    def __init__(self, config: EngineConfig, devices: DeviceManager, part: ModelConfig, stage: Stage) -> None:
        self._config, self._devices, self._part, self._stage = config, devices, part, stage
        self._dtype_bytes: int = getattr(torch, config.model.dtype).itemsize

    def check_weights_fit(self, *models: CausalLM) -> None:
        """Check empty models of a rank, its main one first, before their weights are loaded."""
        counts, sizes = (sum(map(measure, models)) for measure in (num_weights, weights_bytes))
        check_weights_fit(self._part, counts, sizes, self.budget_bytes - self.adapter_bytes(models[0]))

    def adapter_bytes(self, model: CausalLM) -> int:
        """The memory of slots for adapters, and of the host cache where it is the same memory.

        Raises UnsupportedModelError: adapters cannot change this model.
        """
        lora = self._config.lora
        if lora is None:
            return 0
        is_host_memory = self._devices.device.type == "cpu"
        return slot_bytes(model, lora.max_lora_rank, experts=lora.experts) * (
            lora.max_loras + lora.max_cpu_loras * is_host_memory
        )

    @property
    def encoder_bytes(self) -> int:
        """The memory of a vision tower in addition to its weights: cached embeddings, and a step of full budget.

        The peak of a layer: patches in both dtypes; residual, normed input, queries, keys and values, which attention
        rotates in float32, or lays out for windows and for whole images; then what an activation takes in float32. An
        image that is larger than a step's budget takes more in proportion.
        """
        vision, limits, dtype_bytes = self._part.vision, self._config.scheduler, self._dtype_bytes
        if vision is None or not self._stage.is_first:
            return 0
        kept = limits.encoder_cache_tokens * vision.num_outputs * vision.out_hidden_size * dtype_bytes
        patch = vision.patch_values * (4 + dtype_bytes) + vision.hidden_size * (9 * dtype_bytes + 4 * 4)
        patch += vision.intermediate_size * (dtype_bytes + 3 * 4)
        return kept + limits.max_num_batched_tokens * vision.merge_unit * patch

    def report(self, models: Sequence[CausalLM], *, activations: int, graphs: int, scratch: int) -> MemoryReport:
        """Report and log the device's memory with weights loaded and no KV yet.

        `activations`, `graphs` and `scratch`, the KV blocks of padding, are in bytes.
        """
        budget, memory, adapters = self.budget_bytes, self.device, self.adapter_bytes(models[0])
        weights = sum(weights_bytes(model) - model.bytes_in_file for model in models)
        free = memory.free_bytes - sum(model.mapped_bytes for model in models)
        kv_bytes = kv_budget(budget, free, weights, activations + graphs + adapters) - scratch
        report = MemoryReport(
            budget_bytes=budget,
            weights_bytes=weights,
            activation_bytes=activations,
            graph_bytes=graphs,
            kv_bytes=max(0, kv_bytes),
        )
        logger.info(
            "memory: %s total, %s for Octavo: weights %s, activations %s%s%s, KV up to %s",
            *map(gib, (memory.total_bytes, budget, weights, activations)),
            f", graphs {gib(graphs)}" if graphs else "",
            f", adapters {gib(adapters)}" if adapters else "",
            gib(report.kv_bytes),
        )
        return report

    @property
    def budget_bytes(self) -> int:
        """This rank's share of the device's memory: as configured, or the device's default."""
        share = self._config.cache.gpu_memory_utilization or self._devices.default_memory_utilization
        return int(self.device.total_bytes * share)

    @property
    def device(self) -> DeviceMemory:
        """The device's memory, divided equally if all ranks share it."""
        memory, parallel = self._devices.memory(), self._config.parallel
        num_ranks = parallel.world_size * parallel.data_parallel_size if self._devices.ranks_share_memory else 1
        return DeviceMemory(total_bytes=memory.total_bytes // num_ranks, free_bytes=memory.free_bytes // num_ranks)
