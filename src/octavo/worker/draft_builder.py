"""Builds the drafter of a rank: kernels, weights, KV memory; for a head also what keeps hidden states."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from octavo.config.engine import EngineConfig, LoadFormat
from octavo.config.parallel import RankPlace, Stage
from octavo.config.speculative import DraftModelConfig, named_by_key
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.device.manager import DeviceManager
from octavo.distributed.groups import Group
from octavo.errors import InvalidParameterError
from octavo.loader.registry import get_model_loader
from octavo.loader.stored_tensors import stored_tensors
from octavo.models.draft_head import DraftHead
from octavo.models.eagle3 import Eagle3Head
from octavo.models.interfaces import CausalLM
from octavo.models.mtp import MtpHead
from octavo.models.registry import initialize_model
from octavo.worker.draft_progress import OWN_BLOCKS, DraftProgress, EagleProgress
from octavo.worker.graph import StepGraph
from octavo.worker.kv_cache import KVPrefault, allocate_kv_caches, make_kv_cache_spec, make_prefaults
from octavo.worker.memory import activation_bytes
from octavo.worker.rank_drafter import HeadStates, RankDrafter
from octavo.worker.request_rows import RequestRows, RowTables

_EMBEDDING = frozenset({"embed_tokens.weight", "model.embed_tokens.weight"})


class DraftBuilder:
    """Call in this order: `initialize`, `load`, `build`."""

    def __init__(self, config: EngineConfig, draft: DraftModelConfig, place: RankPlace, devices: DeviceManager) -> None:
        """Raises InvalidParameterError for a head where steps are launched before the last one's tokens are known."""
        self._config, self._draft, self._place = config, draft, place
        self._devices = devices
        self._num_slots = self._own_blocks = 0
        if draft.is_head:
            assert config.speculative is not None, "a head comes with options"
            if devices.device.type != "cpu":
                kind, method = devices.device.type, config.speculative.method
                limit = f"one of ngram, draft_model on {kind}: heads run on CPUs only in this version"
                raise InvalidParameterError("speculative_config", {"method": method}, limit)
            self._own_blocks = OWN_BLOCKS  # of each row
            # Between passes, a row collects less than a block, and then all tokens of one more step.
            self._num_slots = config.cache.block_size + config.speculative.num_speculative_tokens + 1
        with named_by_key():
            self._context = devices.build_context(draft.model, draft.quantization, config)
        num_features = draft.model.hidden_size if draft.mtp is not None else 0
        if draft.eagle is not None:
            num_features = draft.eagle.target_hidden_size * len(draft.eagle.aux_layers)
        self._state_bytes = num_features * self._context.dtype.itemsize
        layout_of, layers = self._context.attention.kv_layout, range(draft.model.num_layers)
        self._spec = make_kv_cache_spec(draft.model, layers, config.cache.block_size, layout_of)

    def initialize(self) -> CausalLM:
        """Return the model without weights."""
        draft, model, context = self._draft, self._draft.model, self._context
        if draft.mtp is not None:
            return MtpHead(model, draft.mtp, context)
        if draft.eagle is None:
            return initialize_model(model, context)
        is_dummy = self._config.load.load_format == "dummy"
        names = set() if is_dummy else {tensor.name for tensor in stored_tensors(Path(model.path))}
        return Eagle3Head(model, draft.eagle, context, has_embedding=bool(names & _EMBEDDING), has_map=not is_dummy)

    def load(self, model: CausalLM, target: CausalLM) -> CausalLM:
        """Read its weights. `target` is the model that it drafts for; a head may use parts of it."""
        if isinstance(model, DraftHead):
            model.share(target)
        own: LoadFormat = "dummy" if self._config.load.load_format == "dummy" else "auto"
        return get_model_loader(replace(self._config.load, load_format=own, tensorizer_uri=None)).load(model)

    def with_draft(self, spec: KVCacheSpec) -> KVCacheSpec:
        """Return the spec of a model's cache including the draft model's part of the same blocks.

        With a head, a block also has the state of its last position.
        """
        draft_bytes = [0] * len(spec.groups)
        for group, num_bytes in zip(self._draft.kv_groups, self._spec.bytes_per_block, strict=True):
            draft_bytes[group] += num_bytes
        draft_bytes[self._draft.kv_groups[0]] += self._state_bytes
        return replace(spec, draft_bytes=tuple(draft_bytes))

    @property
    def activation_bytes(self) -> int:
        """An upper bound on the memory of a pass besides weights and KV, with states of rows, and their own blocks."""
        model, limits = self._draft.model, self._config.scheduler
        most_tokens, most_rows = limits.max_num_batched_tokens, limits.max_num_seqs
        kept = most_rows * (self._num_slots * self._state_bytes + self._own_blocks * sum(self._spec.bytes_per_block))
        stage = Stage.whole(model.num_layers)
        size = activation_bytes(model, stage, limits, self._context.dtype.itemsize)
        return size + kept + most_tokens * self._state_bytes

    def build(
        self, model: CausalLM, num_blocks: Sequence[int], num_scratch: Sequence[int], rows: RequestRows, ranks: Group
    ) -> tuple[RankDrafter, list[tuple[int, KVPrefault]]]:
        """Allocate KV memory for `num_blocks` blocks of each of the rows' KV groups, and `num_scratch` more.

        Return the drafter, and the prefaults of its memory by the rows' group.
        """
        config, groups = self._config, self._draft.kv_groups
        num_rows, max_blocks = rows.block_tables[0].shape
        own, max_tokens = self._own_blocks * num_rows, config.scheduler.max_num_batched_tokens
        counts = [num_blocks[group] + num_scratch[group] + own for group in groups]
        kv_caches = allocate_kv_caches(self._spec, counts, self._devices.device)
        prefaults = make_prefaults(kv_caches, self._spec, counts, self._devices.memory().total_bytes, groups)
        graph = None
        if rows.transfers.queue is None and not config.enforce_eager:
            graph = StepGraph.capture(model, kv_caches, config.cache.block_size, max_tokens)
        whole = [group for group in groups if config.model.kv_groups[group].sliding_window is None]
        group = (*whole, *groups)[0]  # one that keeps the most
        places = num_rows, max_blocks
        limits = {"block_size": config.cache.block_size, "group": group, "max_len": self._draft.model.max_model_len}
        progress, states = DraftProgress(*places, num_blocks[group], **limits), None
        tables = [rows.block_tables[group] for group in groups]
        if isinstance(model, DraftHead):
            progress = EagleProgress(*places, num_blocks[group] + num_scratch[group], **limits)
            tables = [torch.from_numpy(progress.tables)]
            states = HeadStates(model, kv_caches, progress, rows, num_slots=self._num_slots, num_blocks=counts[0])
        drafter = RankDrafter(
            model,
            kv_caches,
            graph,
            rows,
            RowTables(rows.transfers, rows.token_ids, rows.block_size, model.config.kv_groups, tables),
            progress,
            states,
            max_tokens=max_tokens,
            uses_processors=self._draft.is_head or (rows.transfers.queue is None and self._place.pp_size == 1),
            ranks=ranks,
        )
        return drafter, prefaults
