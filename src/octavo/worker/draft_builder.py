"""Builds the draft model of a rank: kernels, weights, KV memory."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from octavo.attention.metadata import LayerCache, LayerKVCache
from octavo.config.engine import EngineConfig, LoadFormat
from octavo.config.parallel import RankPlace, Stage
from octavo.config.speculative import DraftModelConfig, named_by_key
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.device.manager import DeviceManager
from octavo.distributed.groups import Group
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import resolve_schemes
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model
from octavo.sampling.native_backend import select_sampler_backend
from octavo.sampling.sampler import Sampler
from octavo.worker.draft_model import DraftModel
from octavo.worker.draft_progress import DraftProgress
from octavo.worker.graph import StepGraph
from octavo.worker.kv_cache import KVPrefault, allocate_kv_caches, make_kv_cache_spec
from octavo.worker.memory import activation_bytes
from octavo.worker.rank_drafting import RankDrafting
from octavo.worker.request_rows import RequestRows


class DraftBuilder:
    """Call in this order: `initialize`, `load`, `build`."""

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModelConfig,
        place: RankPlace,
        devices: DeviceManager,
        dtype: torch.dtype,
    ) -> None:
        self._config, self._draft, self._place = config, draft, place
        self._devices, self._dtype = devices, dtype
        with named_by_key():
            self._schemes, self._kernels = resolve_schemes(
                draft.model.quantization,
                draft.quantization,
                lambda forms: devices.kernels(dtype, forms, deterministic=config.deterministic),
                f"{devices.device.type} with {str(dtype).removeprefix('torch.')}",
            )
        self._attention = devices.attention(dtype, kv_cache_dtype=config.cache.kv_cache_dtype)
        layout = self._attention.kv_layout(draft.model.head_dim)
        self._spec = make_kv_cache_spec(draft.model, range(draft.model.num_layers), config.cache.block_size, layout)

    def initialize(self) -> CausalLM:
        """Return the model without weights."""
        return initialize_model(self._draft.model, self._context())

    def _context(self) -> BuildContext:
        return BuildContext(
            kernels=self._kernels,
            attention=self._attention,
            dtype=self._dtype,
            device=self._devices.device,
            schemes=self._schemes,
        )

    def load(self, model: CausalLM, target: CausalLM) -> CausalLM:
        """Read its weights. `target` is the model that it drafts for."""
        own: LoadFormat = "dummy" if self._config.load.load_format == "dummy" else "auto"
        return get_model_loader(replace(self._config.load, load_format=own, tensorizer_uri=None)).load(model)

    def with_draft(self, spec: KVCacheSpec) -> KVCacheSpec:
        """Return the spec of a model's cache including the draft model's part of the same blocks."""
        draft_bytes = [0] * len(spec.groups)
        for group, num_bytes in zip(self._draft.kv_groups, self._spec.bytes_per_block, strict=True):
            draft_bytes[group] += num_bytes
        return replace(spec, draft_bytes=tuple(draft_bytes))

    @property
    def activation_bytes(self) -> int:
        """An upper bound on the memory of a pass in addition to weights and KV."""
        model, limits = self._draft.model, self._config.scheduler
        return activation_bytes(
            model,
            Stage.whole(model.num_layers),
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            self._dtype.itemsize,
        )

    def build(
        self, model: CausalLM, num_blocks: Sequence[int], num_scratch: Sequence[int], rows: RequestRows, ranks: Group
    ) -> tuple[RankDrafting, list[tuple[int, KVPrefault]]]:
        """Allocate KV memory for `num_blocks` blocks of each of the rows' KV groups, and `num_scratch` more.

        Return the draft model, and the prefaults of its memory by the rows' group.
        """
        config, groups = self._config, self._draft.kv_groups
        kv_caches, prefaults = self._allocate(num_blocks, num_scratch)
        num_rows, max_blocks = rows.block_tables[0].shape
        whole = [group for group in groups if config.model.kv_groups[group].sliding_window is None]
        group = (*whole, *groups)[0]  # one that keeps the most
        progress = DraftProgress(
            num_rows,
            max_blocks,
            num_blocks[group],
            block_size=config.cache.block_size,
            group=group,
            max_len=self._draft.model.max_model_len,
        )
        draft_model = DraftModel(
            model,
            kv_caches,
            self._capture(model, kv_caches, rows),
            rows,
            groups,
            progress,
            self._sampler(rows),
            max_tokens=config.scheduler.max_num_batched_tokens,
            uses_processors=rows.queue is None and self._place.pp_size == 1,
            ranks=ranks,
        )
        return draft_model, prefaults

    def _allocate(
        self, num_blocks: Sequence[int], num_extra: Sequence[int]
    ) -> tuple[list[LayerCache], list[tuple[int, KVPrefault]]]:
        groups = self._draft.kv_groups
        counts = [num_blocks[group] + num_extra[group] for group in groups]
        kv_caches = allocate_kv_caches(self._spec, counts, self._devices.device)
        total_bytes = self._devices.memory().total_bytes
        prefaults = [
            (group, KVPrefault(pools, count, total_bytes))
            for group, of, count in zip(groups, self._spec.groups, counts, strict=True)
            if (pools := [pool for layer in of.layers if isinstance(pool := kv_caches[layer], LayerKVCache)])
        ]
        return kv_caches, prefaults

    def _capture(self, model: CausalLM, kv_caches: Sequence[LayerCache], rows: RequestRows) -> StepGraph | None:
        if rows.queue is not None or self._config.enforce_eager:
            return None
        max_tokens = self._config.scheduler.max_num_batched_tokens
        return StepGraph.capture(model, kv_caches, self._config.cache.block_size, max_tokens)

    def _sampler(self, rows: RequestRows) -> Sampler:
        return Sampler(rows.sampling, select_sampler_backend(rows.sampling.device, self._kernels))
