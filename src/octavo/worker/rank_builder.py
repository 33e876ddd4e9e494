"""Builds the parts of one rank: device, model, KV memory, and the runner that executes steps."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from octavo._version import __version__
from octavo.attention.base import KVLayout
from octavo.attention.metadata import LayerCache, LayerKVCache
from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.device.base import DeviceQueue
from octavo.device.manager import DeviceManager
from octavo.device.process import give_back_freed_memory, keep_freed_memory
from octavo.distributed.connect import make_groups
from octavo.distributed.rendezvous import Rendezvous
from octavo.errors import InvalidParameterError
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import resolve_schemes
from octavo.loader.registry import get_model_loader
from octavo.lora.pool import AdapterPool
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model
from octavo.sampling.rows import SamplingRows
from octavo.worker.computed_dtype import with_computed_dtype
from octavo.worker.decode_graphs import DecodeGraphs, GraphUses, graph_bytes, row_bucket
from octavo.worker.decode_record import DecodeRecord
from octavo.worker.draft_builder import DraftBuilder
from octavo.worker.eagle_builder import EagleBuilder
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.graph import StepGraph
from octavo.worker.graphed_decoding import DecodeStep, GraphedDecoding
from octavo.worker.kv_cache import KVPrefault, allocate_kv_caches, make_kv_cache_spec
from octavo.worker.memory import MemoryReport, choose_num_blocks, sharded_config
from octavo.worker.model_runner import RankModelRunner
from octavo.worker.overlapped_runner import OverlappedRunner
from octavo.worker.profile_run import ProfileRun, measured_peaks
from octavo.worker.rank_drafting import RankDrafting
from octavo.worker.rank_memory import RankMemory
from octavo.worker.request_rows import RequestRows
from octavo.worker.stages import StageLinks, stage_of

logger = logging.getLogger(__name__)


class RankBuilder:
    """Selects implementations by the rank's place and options. The constructor waits until all ranks have connected."""

    def __init__(self, config: EngineConfig, place: RankPlace, rendezvous: Rendezvous) -> None:
        self._place = place
        self.devices = DeviceManager(config.device, config.threads, rendezvous.local_rank)
        self.config = self._config = config = with_computed_dtype(config, self.devices, place)
        is_expert_parallel = config.parallel.enable_expert_parallel
        self._part = sharded_config(config.model, place, is_expert_parallel=is_expert_parallel)
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._schemes, self._kernels = resolve_schemes(
            config.model.quantization,
            config.quantization,
            lambda forms: self.devices.kernels(self._dtype, forms, deterministic=config.deterministic),
            self._where,
        )
        self._attention = self.devices.attention(self._dtype, kv_cache_dtype=config.cache.kv_cache_dtype)
        if config.deterministic:
            self._check_deterministic()
        self._groups = make_groups(place, rendezvous, self.devices.device)
        if is_expert_parallel:
            self._groups = replace(self._groups, experts=self._groups.tensor)
        self._stage = stage_of(config.model, place)
        self._draft: DraftBuilder | None = None
        if config.draft_model is not None:
            builder = DraftBuilder if config.draft_model.eagle is None else EagleBuilder
            self._draft = builder(config, config.draft_model, place, self.devices, self._dtype)
        self._draft_model: CausalLM | None = None
        self._memory = RankMemory(config, self.devices, self._part, self._stage, self._dtype)
        self.queue = self.devices.queue() if self._stage.is_whole else None
        self._adapters: AdapterPool | None = None  # if adapters are served

    @property
    def profile(self) -> str:
        """Device, dtype, kernels and tensor-parallel size, in one word: everything that affects the last bits."""
        kernels = f"{self._kernels.name}-{self._schemes.name}".removesuffix("-")
        names = [self.devices.device.type, str(self._dtype).removeprefix("torch."), kernels]
        ranks = [f"tp{self._place.tp_size}"] if self._place.tp_size > 1 else []
        return "-".join([*names, self._attention.name, *ranks])

    @property
    def _where(self) -> str:
        return f"{self.devices.device.type} with {str(self._dtype).removeprefix('torch.')}"

    def _check_deterministic(self) -> None:
        """Check the kernels against `deterministic`.

        Raises:
            InvalidParameterError: with them, a row's bits may depend on the batch.
        """
        unsure = [part.name for part in (self._kernels, self._attention) if not part.is_batch_invariant]
        if unsure:
            limit = f"false: on {self._where}, bits may depend on the batch in {' and '.join(unsure)}"
            raise InvalidParameterError("deterministic", True, limit)
        logger.info("deterministic: so it is with %s and %s, always", self._kernels.name, self._attention.name)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        spec = make_kv_cache_spec(self._part, self._stage.layers, self._config.cache.block_size, self._kv_layout)
        return spec if self._draft is None else self._draft.with_draft(spec)

    def load_model(self) -> CausalLM:
        """Read the weights; see `Worker.load_model`."""
        start_s = time.perf_counter()
        keep_freed_memory()
        self._memory.check_length_fits()
        context = BuildContext(
            kernels=self._kernels,
            attention=self._attention,
            dtype=self._dtype,
            device=self.devices.device,
            groups=self._groups,
            stage=self._stage,
            schemes=self._schemes,
        )
        model = initialize_model(self._config.model, context)
        draft_model = None if self._draft is None else self._draft.initialize()
        self._memory.check_weights_fit(model, *_existing(draft_model))
        loaded = get_model_loader(self._config.load).load(model)
        if self._draft is not None and draft_model is not None:
            self._draft_model = self._draft.load(draft_model, loaded)
        give_back_freed_memory()  # that no step will use again
        if (lora := self._config.lora) is not None:
            self._adapters = AdapterPool(
                loaded,
                lora.max_loras,
                lora.max_lora_rank,
                self._config.load,
                lambda: self.devices.memory().free_bytes,
                experts=lora.experts,
            )
        logger.info("model %s ready in %.2f s", model.config.model, time.perf_counter() - start_s)
        return loaded

    def count_kv_blocks(self, model: CausalLM) -> list[int]:
        """Measure the memory left; see `Worker.count_kv_blocks`."""
        config, memory = self._config, self.measure_memory(model)
        return choose_num_blocks(config.model, config.cache, self.kv_cache_spec, memory, config.scheduler)

    def measure_memory(self, model: CausalLM) -> MemoryReport:
        """Report the device's memory with weights loaded and no KV yet."""
        activations, graphs = self._step_bytes(model)
        activations += self._memory.encoder_bytes + (self._draft.activation_bytes if self._draft else 0)
        scratch, models = self.kv_cache_spec.num_bytes(self._scratch_blocks), (model, *_existing(self._draft_model))
        return self._memory.report(models, activations=activations, graphs=graphs, scratch=scratch)

    def _step_bytes(self, model: CausalLM) -> tuple[int, int]:
        """Return the memory of a step besides weights and KV, and of graphs; estimated if the device tracks none."""
        if self.queue is not None:
            steps = ProfileRun(model, self._config, self.kv_cache_spec)
            peaks = measured_peaks(steps, self.devices.peak_bytes)
            if peaks is not None:
                return max(peaks), graph_bytes(peaks[1]) if self._takes_graphs else 0
        return self._memory.estimated_activations, 0

    def build_runner(
        self, model: CausalLM, num_blocks: Sequence[int]
    ) -> tuple[RankModelRunner, list[tuple[int, KVPrefault]]]:
        """Allocate `num_blocks` KV blocks of each group; build the runner that uses them, and prefaults by group."""
        config, spec = self._config, self.kv_cache_spec
        with_scratch = [count + extra for count, extra in zip(num_blocks, self._scratch_blocks, strict=True)]
        kv_caches = allocate_kv_caches(spec, with_scratch, self.devices.device)
        prefaults = [
            (index, KVPrefault(pools, count, self._memory.total_bytes))
            for index, (of, count) in enumerate(zip(spec.groups, with_scratch, strict=True))
            if (pools := [pool for layer in of.layers if isinstance(pool := kv_caches[layer], LayerKVCache)])
        ]  # states take little memory, and reuse it
        num_rows = config.scheduler.max_num_seqs + self._takes_graphs  # one for padding only
        rows = RequestRows(
            num_rows=num_rows,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            groups=config.model.kv_groups,
            sampling=SamplingRows(
                num_rows, config.model.vocab_size, self.devices.device, processors_on_device=self.queue is not None
            ),
            device=self.devices.device,
            queue=self.queue,
        )
        draft_model: RankDrafting | None = None
        if self._draft is not None and self._draft_model is not None:
            draft_model, of_draft = self._draft.build(
                self._draft_model, num_blocks, self._scratch_blocks, rows, self._groups.tensor
            )
            prefaults += of_draft
        loads = ExpertLoads.of(model) if self._place.returns_output else None  # before steps are recorded
        if self.queue is None:
            graph = self._capture_graph(model, kv_caches)
            links = self._links()
            return RankModelRunner(model, kv_caches, rows, graph, links, loads, draft_model, self._adapters), prefaults
        graphs = self._decode_graphs(self.queue, model, rows, kv_caches, num_blocks, loads)
        runner = OverlappedRunner(model, kv_caches, rows, self.queue, graphs, loads, draft_model, self._adapters)
        return runner, prefaults

    def _decode_graphs(
        self,
        queue: DeviceQueue,
        model: CausalLM,
        rows: RequestRows,
        kv_caches: Sequence[LayerCache],
        scratch_blocks: Sequence[int],
        loads: ExpertLoads | None,
    ) -> GraphedDecoding | None:
        """Return the capturer of decode steps; None if they are computed op by op, by choice or necessity."""
        if not self._takes_graphs:
            return None
        config, scratch_row = self._config, self._config.scheduler.max_num_seqs
        for table, scratch_block in zip(rows.block_tables, scratch_blocks, strict=True):
            table[scratch_row] = scratch_block
        record = DecodeRecord(row_bucket(scratch_row), scratch_row, scratch_blocks[0], self.devices.device)
        step = DecodeStep(model, kv_caches, rows, record, loads)
        uses = GraphUses.of(
            __version__,
            torch.__version__,
            self.profile,
            self.devices.describe()["processor"],
            config.model,
            config.scheduler.max_num_seqs,
            config.cache.block_size,
            config.quantization,
        )
        return GraphedDecoding(step, rows, queue, DecodeGraphs(queue, step.of_key, uses), config.model.max_model_len)

    def _links(self) -> StageLinks | None:
        if self._stage.is_whole:
            return None
        return StageLinks(self._groups.stages, self._config.model.hidden_size, self._dtype, self.devices.device)

    def _capture_graph(self, model: CausalLM, kv_caches: Sequence[LayerCache]) -> StepGraph | None:
        config = self._config
        if config.enforce_eager:
            return None
        max_tokens = config.scheduler.max_num_batched_tokens
        return StepGraph.capture(model, kv_caches, config.cache.block_size, max_tokens)

    @property
    def _takes_graphs(self) -> bool:
        """Whether decoding is captured. Not with several ranks, nor if attention or experts wait for the device."""
        is_capturable = self._attention.is_capturable and self._place.tp_size == 1
        if self._config.model.moe is not None:
            is_capturable &= self._kernels.captures_experts
        return self.queue is not None and is_capturable and not self._config.enforce_eager

    @property
    def _scratch_blocks(self) -> list[int]:
        """Number of scratch blocks of each group, after all others: for padding, and for freed out-of-window blocks."""
        windows = [of.group.sliding_window for of in self.kv_cache_spec.groups]
        return [int(self._takes_graphs or window is not None) for window in windows]

    @property
    def _kv_layout(self) -> KVLayout:
        return self._attention.kv_layout(self._config.model.head_dim)


def _existing(model: CausalLM | None) -> list[CausalLM]:
    return [] if model is None else [model]
