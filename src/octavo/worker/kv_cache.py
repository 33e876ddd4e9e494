"""The KV tensors of a rank, and the prefaulting of their memory."""

import logging
from collections.abc import Callable, Sequence

import torch

from octavo.attention.base import KVLayout
from octavo.attention.metadata import LayerCache, LayerKVCache
from octavo.config.layers import AttentionSpec, Mixer, RecurrentSpec
from octavo.config.model import DType, ModelConfig
from octavo.contracts.kv_cache import KVCacheSpec, KVGroupSpec, KVPart
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.kernels.large_pages import LARGE_PAGE_BYTES, prefault, zeros_on_large_pages
from octavo.kernels.states import StateTensors

logger = logging.getLogger(__name__)

# How far ahead of its use memory is prefaulted: the minimum of these.
_MAX_AHEAD_TOKENS = 1 << 14  # that a burst may write before the engine is idle again
_MAX_AHEAD_BYTES = 2 << 30
_MAX_AHEAD_SHARE = 16  # of memory: on small machines other processes need it more


def make_kv_cache_spec(
    model: ModelConfig, layers: Sequence[int], block_size: int, layout_of: Callable[[int], KVLayout]
) -> KVCacheSpec:
    """Return the KV cache spec of these layers of a rank's shard; `layout_of` a head size is that of attention.

    Raises InvalidParameterError: latent vectors in another dtype than the model's; UnsupportedModelError: a layer reads
    the keys and values of one that is on another stage.
    """
    kept = model.kept(layers) if model.encoder is None else []
    shared = _shared_layers(model, kept)
    group_of = [None if at in shared else model.kv_group_of_mixer(mixer) for at, (_, mixer) in enumerate(kept)]
    groups = []
    for index, group in enumerate(model.kv_groups):
        mixer = next(each for each in model.mixers if model.kv_group_of_mixer(each) == index)
        latent = mixer.latent if isinstance(mixer, AttentionSpec) else None
        groups.append(
            KVGroupSpec(
                group=group,
                layers=tuple(layer for layer, of in enumerate(group_of) if of == index),
                parts=_parts(mixer, model.dtype, layout_of),
                value_size=None if latent is None else latent.rank,
            )
        )
    return KVCacheSpec(block_size=block_size, groups=tuple(groups), shared=tuple(shared.items()))


def _shared_layers(model: ModelConfig, kept: Sequence[tuple[int, Mixer]]) -> dict[int, int]:
    """Return which layers read the cache of which, by their places among all that is kept."""
    shared, layers = {}, [layer for layer, _ in kept]
    for at, (layer, mixer) in enumerate(kept):
        if not isinstance(mixer, AttentionSpec) or mixer.shares_kv_of is None:
            continue
        if mixer.shares_kv_of not in layers:
            reads = f"layer {layer} reads keys and values of layer {mixer.shares_kv_of}, which is on another stage"
            raise UnsupportedModelError(f"{model.model}: {reads}; use fewer pipeline stages")
        shared[at] = layers.index(mixer.shares_kv_of)
    return shared


def attention_parts(num_kv_heads: int, layout: KVLayout) -> tuple[KVPart, ...]:
    """Return the parts that a token's key and value consist of."""
    return (_part((num_kv_heads, layout.head_size), layout.dtype),) * 2


def _parts(mixer: Mixer, dtype_name: DType, layout_of: Callable[[int], KVLayout]) -> tuple[KVPart, ...]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    if isinstance(mixer, RecurrentSpec):
        conv = _part(mixer.conv_shape, dtype)
        return (conv,) if mixer.matrix_shape is None else (conv, _part(mixer.matrix_shape, torch.float32))
    layout = layout_of(mixer.head_dim)
    if mixer.latent is None:
        return attention_parts(mixer.num_kv_heads, layout)
    if layout.dtype != dtype:
        raise InvalidParameterError("kv_cache_dtype", str(layout.dtype), f"latent vectors are kept in {dtype_name}")
    return (_part((1, mixer.latent.size), dtype),)


def _part(shape: tuple[int, ...], dtype: torch.dtype) -> KVPart:
    return KVPart(shape, str(dtype).removeprefix("torch."), dtype.itemsize)


def allocate_kv_caches(spec: KVCacheSpec, num_blocks: Sequence[int], device: torch.device) -> list[LayerCache]:
    """Return one cache per layer, with `num_blocks` of its group, zeroed, so that unwritten slots are never NaN."""
    caches: dict[int, LayerCache] = {}
    for group, count in zip(spec.groups, num_blocks, strict=True):
        num_entries = count * group.entries_per_block(spec.block_size)
        for layer in group.layers:
            shapes = [((num_entries, *part.shape), getattr(torch, part.dtype)) for part in group.parts]
            if device.type == "cpu":
                # Unused blocks cost no memory, and startup no time. With small pages, a first prompt of 1,024 tokens
                # took 28,000 page faults in Qwen3-0.6B. The block pool keeps requests close together, so that several
                # share a large page.
                pools = [zeros_on_large_pages(shape, dtype) for shape, dtype in shapes]
            else:
                pools = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
            if group.group.kind == "recurrent":
                caches[layer] = StateTensors(*pools)
            elif group.group.kind == "latent":
                [vectors] = pools
                caches[layer] = LayerKVCache(vectors, vectors[..., : group.value_size])
            else:
                caches[layer] = LayerKVCache(*pools)
    caches |= {layer: caches[owner] for layer, owner in spec.shared}
    return [caches[layer] for layer in range(len(caches))]


class KVPrefault:
    """Prefaults KV memory when the engine is idle, one large page at a time, ahead of the blocks in use.

    The system allocates a page at its first write. That takes 0.2 ms on bare metal, but 6 ms on a virtual machine whose
    host has to allocate it, too: then the KV memory of a token takes as long as the token. One per group: its tensors
    advance together, as a block has a part in each of them.
    """

    def __init__(self, kv_caches: Sequence[LayerKVCache], num_blocks: int, device_bytes: int) -> None:
        tensors = [tensor for cache in kv_caches for tensor in cache.pools]
        self._tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        self._block_bytes = tensors[0].nbytes // num_blocks
        ahead_bytes = min(_MAX_AHEAD_BYTES, device_bytes // _MAX_AHEAD_SHARE)
        ahead_blocks = _MAX_AHEAD_TOKENS * num_blocks // len(tensors[0])
        self._max_ahead = min(ahead_blocks, ahead_bytes // (self._block_bytes * len(tensors)))
        self._num_blocks = num_blocks
        self._num_done = 0  # pages of all tensors, the first of each, then the second ...

    def step(self, num_reached_blocks: int) -> bool:
        """Prefault the next page; False if all pages that the next requests may need are present.

        Only blocks 0 to `num_reached_blocks` - 1 have ever been in use.
        """
        end = min(self._num_blocks, num_reached_blocks + self._max_ahead) * self._block_bytes
        if not self._tensors or self._start >= end:
            return False
        tensor = self._tensors[self._num_done % len(self._tensors)]
        if not prefault(tensor, self._start, min(LARGE_PAGE_BYTES, tensor.nbytes - self._start)):
            logger.info("the system cannot prefault memory: first steps on new KV memory take longer")
            self._tensors = []
            return False
        self._num_done += 1
        return True

    @property
    def _start(self) -> int:
        """Offset of the next page in its tensor, in bytes."""
        return self._num_done // len(self._tensors) * LARGE_PAGE_BYTES


def make_prefaults(
    kv_caches: Sequence[LayerCache],
    spec: KVCacheSpec,
    num_blocks: Sequence[int],
    device_bytes: int,
    groups: Sequence[int] | None = None,
) -> list[tuple[int, KVPrefault]]:
    """Return the prefaults of caches with `num_blocks` of each group, by number: that in `groups`, or their own."""
    return [
        (number, KVPrefault(pools, count, device_bytes))
        for number, of, count in zip(groups or range(len(spec.groups)), spec.groups, num_blocks, strict=True)
        if (pools := [pool for layer in of.layers if isinstance(pool := kv_caches[layer], LayerKVCache)])
    ]  # states take little memory, and reuse it
