"""Builds the EAGLE-3 head of a rank."""

from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.config.speculative import DraftModelConfig, EagleConfig
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.device.manager import DeviceManager
from octavo.distributed.groups import Group
from octavo.errors import InvalidParameterError
from octavo.loader.registry import tensor_names
from octavo.models.common import DecoderForCausalLM
from octavo.models.eagle3 import Eagle3Head
from octavo.models.interfaces import CausalLM
from octavo.worker.draft_builder import DraftBuilder
from octavo.worker.eagle_model import EagleModel
from octavo.worker.eagle_progress import OWN_BLOCKS, EagleProgress
from octavo.worker.kv_cache import KVPrefault
from octavo.worker.rank_drafting import RankDrafting
from octavo.worker.request_rows import RequestRows

_EMBEDDING = frozenset({"embed_tokens.weight", "model.embed_tokens.weight"})


class EagleBuilder(DraftBuilder):
    """See `DraftBuilder`."""

    def __init__(
        self,
        config: EngineConfig,
        draft: DraftModelConfig,
        place: RankPlace,
        devices: DeviceManager,
        dtype: torch.dtype,
    ) -> None:
        """Raises InvalidParameterError on a device whose steps are launched before the last one's tokens are known."""
        super().__init__(config, draft, place, devices, dtype)
        if devices.device.type != "cpu":
            limit = (
                f"one of ngram, draft_model on {devices.device.type}: EAGLE-3 heads run on CPUs only in this version"
            )
            raise InvalidParameterError("speculative_config", {"method": "eagle3"}, limit)
        options = config.speculative
        assert options is not None and draft.eagle is not None  # noqa: PT018 - both or none
        self._eagle: EagleConfig = draft.eagle
        self._num_features = draft.eagle.target_hidden_size * len(draft.eagle.aux_layers)
        # Between passes, a row collects less than a block, and then all tokens of one more step.
        self._num_slots = config.cache.block_size + options.num_speculative_tokens + 1

    def initialize(self) -> CausalLM:
        """See `DraftBuilder.initialize`."""
        config = self._draft.model
        is_dummy = self._config.load.load_format == "dummy"
        names = frozenset[str]() if is_dummy else tensor_names(Path(config.path))
        has_embedding = bool(names & _EMBEDDING)
        return Eagle3Head(config, self._eagle, self._context(), has_embedding=has_embedding, has_map=not is_dummy)

    def load(self, model: CausalLM, target: CausalLM) -> CausalLM:
        """See `DraftBuilder.load`. The target hands out hidden states from now on."""
        assert isinstance(model, Eagle3Head)
        assert isinstance(target, DecoderForCausalLM), "all families are"
        target.aux_layers = self._eagle.aux_layers
        if not model.has_embedding:
            model.share_embedding(target.embedding)
        return super().load(model, target)

    def with_draft(self, spec: KVCacheSpec) -> KVCacheSpec:
        """See `DraftBuilder.with_draft`. A block also has the state of its last position."""
        return self._add_bytes(super().with_draft(spec), self._state_bytes)

    def _add_bytes(self, spec: KVCacheSpec, num_bytes: int) -> KVCacheSpec:
        draft_bytes = list(spec.draft_bytes)
        draft_bytes[self._draft.kv_groups[0]] += num_bytes
        return KVCacheSpec(block_size=spec.block_size, groups=spec.groups, draft_bytes=tuple(draft_bytes))

    @property
    def _state_bytes(self) -> int:
        return self._num_features * self._dtype.itemsize

    @property
    def activation_bytes(self) -> int:
        """See `DraftBuilder.activation_bytes`. Includes states of rows, and their own blocks."""
        rows = self._config.scheduler.max_num_seqs
        kept = rows * (self._num_slots * self._state_bytes + OWN_BLOCKS * sum(self._spec.bytes_per_block))
        return super().activation_bytes + kept + self._config.scheduler.max_num_batched_tokens * self._state_bytes

    def build(
        self, model: CausalLM, num_blocks: Sequence[int], num_scratch: Sequence[int], rows: RequestRows, ranks: Group
    ) -> tuple[RankDrafting, list[tuple[int, KVPrefault]]]:
        """See `DraftBuilder.build`. Every row has blocks of its own."""
        assert isinstance(model, Eagle3Head)
        (group,) = self._draft.kv_groups
        num_rows, max_blocks = rows.block_tables[group].shape
        kv_caches, prefaults = self._allocate(num_blocks, [extra + OWN_BLOCKS * num_rows for extra in num_scratch])
        num_ids, block_size = num_blocks[group] + num_scratch[group], self._config.cache.block_size
        eagle_model = EagleModel(
            model,
            kv_caches,
            self._capture(model, kv_caches, rows),
            rows,
            EagleProgress(
                num_rows,
                max_blocks,
                num_ids,
                block_size=block_size,
                group=group,
                max_len=self._draft.model.max_model_len,
            ),
            self._sampler(rows),
            num_features=self._num_features,
            num_slots=self._num_slots,
            num_blocks=num_ids + OWN_BLOCKS * num_rows,
            max_tokens=self._config.scheduler.max_num_batched_tokens,
            ranks=ranks,
        )
        return eagle_model, prefaults
