"""The worker: one rank from start to end. It builds its parts; its runner executes every step."""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from octavo._version import __version__
from octavo.attention.metadata import LayerCache
from octavo.config.engine import EngineConfig
from octavo.config.model import DType
from octavo.config.parallel import ALONE, RankPlace, Rendezvous
from octavo.contracts.engine import AdapterRef
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.contracts.stored import BlocksWritten, StoreOpened
from octavo.device.manager import DeviceManager
from octavo.device.process import give_back_freed_memory, keep_freed_memory
from octavo.distributed.connect import make_groups
from octavo.errors import InvalidParameterError, UserError
from octavo.loader.packed_cache import cache_folder, checkpoint_digest
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.models.registry import initialize_model
from octavo.worker.block_store import BlockStore
from octavo.worker.decode_graphs import GraphUses, graph_bytes, row_bucket
from octavo.worker.decode_step import DecodeRecord, ExpertLoads, GraphedDecoding
from octavo.worker.draft_builder import DraftBuilder
from octavo.worker.draft_log import log_bytes, with_logs
from octavo.worker.graph import StepGraph
from octavo.worker.kv_cache import KVPrefault, allocate_kv_caches, make_kv_cache_spec, make_prefaults
from octavo.worker.memory import (
    MemoryReport,
    RankMemory,
    activation_bytes,
    check_length_fits,
    choose_num_blocks,
    sharded_config,
)
from octavo.worker.model_runner import RankModelRunner
from octavo.worker.model_state import ModelStates
from octavo.worker.request_rows import RequestRows, Transfers
from octavo.worker.stages import StageLinks, plan_stages
from octavo.worker.warmup import ProfileRun, warm_up

logger = logging.getLogger(__name__)

_NOBODY_ELSE = Rendezvous()


class Worker:
    """One rank from start to end: selects implementations by its place and options, builds its parts, runs its steps.

    Call in this order: `load_model`, `count_kv_blocks`, `initialize_kv_cache`, `begin`. With several ranks, call each
    method on all of them concurrently, as it may communicate. The constructor returns when all ranks of the replica
    have connected.
    """

    def __init__(self, config: EngineConfig, place: RankPlace = ALONE, rendezvous: Rendezvous = _NOBODY_ELSE) -> None:
        self.place = place
        self.devices = DeviceManager(config.device, config.threads, rendezvous.local_rank)
        self.config = config = with_computed_dtype(config, self.devices, place)
        is_expert_parallel = config.parallel.enable_expert_parallel
        self._part = sharded_config(config.model, place, is_expert_parallel=is_expert_parallel)
        context = self.devices.build_context(config.model, config.quantization, config)
        self._kernels, self._attention = context.kernels, context.attention
        if config.deterministic:
            unsure = [part.name for part in (self._kernels, self._attention) if not part.is_batch_invariant]
            unsure += ["transformers' own code"] * (config.model.impl == "transformers")
            if unsure:
                where, which = self.devices.where(context.dtype), " and ".join(unsure)
                limit = f"false: on {where}, bits may depend on the batch in {which}"
                raise InvalidParameterError("deterministic", True, limit)
            logger.info("deterministic: so it is with %s and %s, always", self._kernels.name, self._attention.name)
        groups = make_groups(place, rendezvous, self.devices.device)
        if is_expert_parallel:
            groups = replace(groups, experts=groups.tensor)
        self._stage = plan_stages(config.model, place.pp_size)[place.pp_rank]
        draft = config.draft_model
        aux_layers = draft.eagle.aux_layers if draft is not None and draft.eagle is not None else ()
        self._context = replace(context, groups=groups, stage=self._stage, aux_layers=aux_layers)
        self._draft: DraftBuilder | None = None
        with self._or_no_drafts():
            self._draft = None if draft is None else DraftBuilder(config, draft, place, self.devices)
        config = self.config
        self._memory = RankMemory(config, self.devices, self._part, self._stage)
        self.queue = self.devices.queue() if self._stage.is_whole else None
        self._transfers = Transfers(self.devices.device, self.queue)
        self._models: list[CausalLM] = []  # the rank's own, and perhaps a draft model
        self._states: ModelStates | None = None
        self._runner: RankModelRunner | None = None
        self._adapter_loads: ThreadPoolExecutor | None = None  # one thread, with the first adapter
        self._block_store: BlockStore | None = None
        self._kv_prefaults: list[tuple[int, KVPrefault]] = []  # with their KV group

    @property
    def model(self) -> CausalLM:
        assert self._models, "call load_model first"
        return self._models[0]

    @property
    def runner(self) -> RankModelRunner:
        assert self._runner is not None, "call initialize_kv_cache first"
        return self._runner

    @property
    def profile(self) -> str:
        """Device, dtype, kernels and tensor-parallel size, in one word: everything that affects the last bits."""
        kernels = f"{self._kernels.name}-{self._context.schemes.name}".removesuffix("-")
        names = [self.devices.device.type, str(self._context.dtype).removeprefix("torch."), kernels]
        ranks = [f"tp{self.place.tp_size}"] if self.place.tp_size > 1 else []
        return "-".join([*names, self._attention.name, *ranks])

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        block_size, layout_of = self.config.cache.block_size, self._attention.kv_layout
        spec = make_kv_cache_spec(self._part, self._stage.layers, block_size, layout_of)
        return spec if self._draft is None else self._draft.with_draft(spec)

    def load_model(self) -> None:
        """Read the weights.

        Raises InsufficientMemoryError: they cannot fit; raised before reading anything. CheckpointError: the files do
        not match the configuration.
        """
        start_s, config = time.perf_counter(), self.config
        keep_freed_memory()
        check_length_fits(self._part, self._memory.budget_bytes)
        models = [initialize_model(config.model, self._context)]
        with self._or_no_drafts():
            models += [] if self._draft is None else [self._draft.initialize()]
        self._memory.check_weights_fit(*models)
        self._models = [get_model_loader(config.load).load(models[0])]
        with self._or_no_drafts():
            self._models += [] if self._draft is None else [self._draft.load(models[1], self.model)]
        config = self.config
        give_back_freed_memory()  # that no step will use again
        send, memory = self._transfers.send, self.devices.memory
        self._states = ModelStates.of_model(self.model, config, send, lambda: memory().free_bytes)
        logger.info("model %s ready in %.2f s", config.model.model, time.perf_counter() - start_s)

    @contextmanager
    def _or_no_drafts(self) -> Iterator[None]:
        """Go on without drafts where a head that nobody asked for cannot draft."""
        try:
            yield
        except UserError as error:
            draft = self.config.draft_model
            if draft is None or not draft.is_optional:
                raise
            if self.place.rank == 0:
                logger.warning("%s has an MTP head, which does not draft: %s", self.config.model.model, error)
            self._draft, self.config = None, replace(self.config, speculative=None, draft_model=None)

    def draws_drafts(self) -> bool:
        """Return whether this rank drafts."""
        return self._draft is not None

    def count_kv_blocks(self) -> list[int]:
        """Measure the memory left; return how many KV blocks of each group fit into it.

        Raises InsufficientMemoryError: too few for a single request.
        """
        config, memory = self.config, self.measure_memory()
        return choose_num_blocks(config.model, config.cache, self.kv_cache_spec, memory, config.scheduler)

    def measure_memory(self) -> MemoryReport:
        """Report the device's memory with weights loaded and no KV yet."""
        activations, graphs = self._step_bytes()
        activations += self._memory.encoder_bytes + (self._draft.activation_bytes if self._draft else 0)
        scratch = self.kv_cache_spec.num_bytes(self._scratch_blocks)
        scratch += log_bytes(self.config, self._part, self._stage.layers, self.config.scheduler.max_num_seqs)
        return self._memory.report(self._models, activations=activations, graphs=graphs, scratch=scratch)

    def _step_bytes(self) -> tuple[int, int]:
        """Return the memory of a step besides weights and KV, and of graphs; estimated if the device tracks none."""
        if self.queue is not None:
            steps = ProfileRun(self.model, self.config, self.kv_cache_spec)
            prefill, decode = (self.devices.peak_bytes(steps.prefill), self.devices.peak_bytes(steps.decode))
            if prefill is not None and decode is not None:
                return max(prefill, decode), graph_bytes(decode) if self._takes_graphs else 0
        return activation_bytes(self._part, self._stage, self.config.scheduler, self._context.dtype.itemsize), 0

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        """Allocate `num_blocks` KV blocks of each group, equal on all ranks, and build the runner that uses them."""
        config, spec, context = self.config, self.kv_cache_spec, self._context
        model, states = self.model, self._states
        assert states is not None, "call load_model first"
        with_scratch = [count + extra for count, extra in zip(num_blocks, self._scratch_blocks, strict=True)]
        num_rows = config.scheduler.max_num_seqs + self._takes_graphs  # one for padding only
        kv_caches = allocate_kv_caches(spec, with_scratch, self.devices.device)
        if config.model.encoder is None:
            kv_caches = with_logs(kv_caches, config, self._part, self._stage.layers, num_rows)
        self._kv_prefaults = make_prefaults(kv_caches, spec, with_scratch, self._memory.device.total_bytes)
        rows = RequestRows(config, num_rows, states, self._transfers)
        drafter = None
        if self._draft is not None:
            ranks = context.groups.tensor
            drafter, more = self._draft.build(self._models[1], num_blocks, self._scratch_blocks, rows, ranks)
            self._kv_prefaults += more
        loads = ExpertLoads.of_model(model) if self.place.returns_output else None  # before steps are recorded
        graph = links = None
        if self.queue is None and not config.enforce_eager:
            limits = config.cache.block_size, config.scheduler.max_num_batched_tokens
            graph = StepGraph.capture(model, kv_caches, *limits)
        if not self._stage.is_whole:
            links = StageLinks(context.groups.stages, config.model.hidden_size, context.dtype, context.device)
        graphs = self._decode_graphs(rows, kv_caches, num_blocks, loads)
        self._runner = RankModelRunner(
            model, kv_caches, rows, graph=graph, graphs=graphs, links=links, expert_loads=loads, drafter=drafter
        )

    def warmup(self) -> None:
        """Run a small prefill and a few decode steps without side effects.

        Then capture the graphs that engines like this one used before.
        """
        warm_up(self.runner, self.config)
        if self.runner.graphs is not None:
            self.runner.graphs.captured.capture_known()
        if self.runner.expert_loads is not None:
            self.runner.expert_loads.reset()

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps to begin before the oldest has finished: two if the host would otherwise wait."""
        return 1 if self.queue is None else 2

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin one step; see `RankModelRunner.begin`."""
        return self.runner.begin(scheduler_output)

    def load_adapter(self, adapter: AdapterRef, evicted: list[str]) -> Future[None]:
        """Drop adapters from the host cache, by their content hashes, and read another one into it.

        In a thread, while steps go on. Slots keep their copies of those dropped, and no step fills a slot from one.
        The future raises CheckpointError or AdapterError if the files are damaged or do not fit the model.
        """
        assert self._states is not None, "call load_model first"
        if self._adapter_loads is None:
            self._adapter_loads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-adapters")
        return self._adapter_loads.submit(self._states.adapters.load, adapter, evicted)

    def open_block_store(self, number: int, max_bytes: int) -> StoreOpened:
        """Open the files for KV blocks with this number, or say why not; see `BlockStore.open`."""
        if (reason := self._why_no_block_store()) is not None:
            return StoreOpened(state="unsupported", reason=reason)
        spec = replace(self.kv_cache_spec, draft_bytes=())  # what a draft model has in them is not kept
        caches = self.runner.kv_caches
        is_host = self.queue is None and self.devices.device.type == "cpu"
        self._block_store = BlockStore(cache_folder("prefix"), spec, caches, self._facts_of_kv(), is_host=is_host)
        return self._block_store.open(number, max_bytes)

    def limit_block_store(self, counts: list[int]) -> None:
        """Keep at most so many blocks of each group on disk."""
        self.block_store.limit(counts)

    def save_blocks(
        self, groups: list[int], block_ids: list[int], slots: list[int], hashes: list[bytes]
    ) -> Future[BlocksWritten]:
        """Copy KV blocks and write them to disk, in a thread; see `BlockStore.save`."""
        return self.block_store.save(groups, block_ids, slots, hashes)

    def read_blocks(
        self, groups: list[int], block_ids: list[int], slots: list[int], hashes: list[bytes]
    ) -> Future[list[tuple[int, str]]]:
        """Read KV blocks from disk, in a thread, into memory that no step uses; see `BlockStore.read`."""
        if self.runner.drafter is not None:
            self.runner.drafter.forget_blocks(groups, block_ids)
        return self.block_store.read(groups, block_ids, slots, hashes)

    def place_blocks(self, groups: list[int], block_ids: list[int]) -> None:
        """Put KV blocks that have been read from disk where steps find them."""
        self.block_store.place(groups, block_ids)

    def drop_blocks(self, groups: list[int], slots: list[int]) -> Future[None]:
        """Forget KV blocks on disk."""
        return self.block_store.drop(groups, slots)

    def close_block_store(self) -> None:
        """Close the files for KV blocks, if they are open."""
        if self._block_store is not None:
            self._block_store.close()
            self._block_store = None

    @property
    def block_store(self) -> BlockStore:
        assert self._block_store is not None, "call open_block_store first"
        return self._block_store

    def _why_no_block_store(self) -> str | None:
        """Say why KV blocks cannot be kept on disk; None: they can."""
        if self.config.load.tensorizer_uri is not None:
            return "weights from tensorizer_uri may change without a trace"
        return None

    def _facts_of_kv(self) -> list[object]:
        """Return what the contents of KV blocks depend on, besides their geometry and the request."""
        config, place = self.config, self.place
        weights = checkpoint_digest(Path(config.model.path), config.load.load_format, config.load.seed)
        layout = self._kernels.layout  # has the digest of the kernels' library
        ranks = [place.tp_rank, place.tp_size, place.pp_rank, place.pp_size, config.parallel.enable_expert_parallel]
        versions = [__version__, torch.__version__, self.profile, self.devices.describe()["processor"], layout]
        return [*versions, weights, config.model, config.quantization, ranks]

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """Prefault some KV memory after the blocks in use, for a few ms; False if enough of it is present."""
        return any(prefault.step(num_reached_blocks[group]) for group, prefault in self._kv_prefaults)

    def _decode_graphs(
        self, rows: RequestRows, kv_caches: Sequence[LayerCache], scratch: Sequence[int], loads: ExpertLoads | None
    ) -> GraphedDecoding | None:
        """Return the capturer of decode steps; None if they are computed op by op, by choice or necessity."""
        if self.queue is None or not self._takes_graphs:
            return None
        config, scratch_row = self.config, self.config.scheduler.max_num_seqs
        for table, scratch_block in zip(rows.block_tables, scratch, strict=True):
            table[scratch_row] = scratch_block
        size, vocab_size = row_bucket(scratch_row), config.model.vocab_size
        record = DecodeRecord(size, scratch_row, scratch[0], vocab_size, self.devices.device)
        uses = GraphUses.of_engine(
            __version__,
            torch.__version__,
            self.profile,
            self.devices.describe()["processor"],
            config.model,
            config.scheduler.max_num_seqs,
            config.cache.block_size,
            config.quantization,
        )
        return GraphedDecoding(self.model, kv_caches, rows, record, self.queue, uses, loads)

    @property
    def _takes_graphs(self) -> bool:
        """Whether decoding is captured. Not with several ranks, nor if attention or experts wait for the device."""
        is_capturable = self._attention.is_capturable and self.place.tp_size == 1
        if self.config.model.experts is not None:
            is_capturable &= self._kernels.captures_experts
        is_capturable &= self.config.model.encoder is None
        return self.queue is not None and is_capturable and not self.config.enforce_eager

    @property
    def _scratch_blocks(self) -> list[int]:
        """Number of scratch blocks of each group, after all others: for padding, and for freed out-of-window blocks."""
        windows = [of.group.sliding_window for of in self.kv_cache_spec.groups]
        return [int(self._takes_graphs or window is not None) for window in windows]


def with_computed_dtype(config: EngineConfig, devices: DeviceManager, place: RankPlace) -> EngineConfig:
    """Return `config` with the dtype in which its models are computed on this device; the first rank logs a change.

    To know the device takes torch. Raises InvalidParameterError if it does not support the dtype.
    """
    stated, draft = config.model.dtype, config.draft_model
    is_quantized = config.model.quantization is not None or config.quantization is not None
    asked = "auto" if config.is_dtype_auto else stated
    resolved = devices.resolve_dtype(asked, stated, is_quantized=is_quantized)
    dtype = cast(DType, str(resolved).removeprefix("torch."))
    if place.rank == 0 and devices.is_slow(stated, is_quantized=is_quantized):
        if dtype == stated:
            logger.warning(
                "dtype=%s: this CPU has no kernels for it, so torch's reference ops compute, at a small fraction of "
                "bfloat16's speed, and bits may depend on the batch",
                dtype,
            )
        else:
            logger.warning(
                "%s is stored in %s, for which this CPU has no kernels: computing in %s; dtype=%s would compute slowly",
                config.model.model, stated, dtype, stated,
            )  # fmt: skip
    if dtype == stated:
        return config
    if draft is not None:
        draft = replace(draft, model=replace(draft.model, dtype=dtype))
    return replace(config, model=replace(config.model, dtype=dtype), draft_model=draft)
