"""The worker: one rank from start to end. Sets up device, model and memory, then hands every step to its runner."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from octavo._version import __version__
from octavo.attention.base import KVLayout
from octavo.attention.metadata import LayerCache, LayerKVCache
from octavo.config.engine import EngineConfig
from octavo.config.parallel import ALONE, RankPlace
from octavo.contracts.kv_cache import KVCacheSpec, MemoryReport
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.device.device_queue import DeviceQueue
from octavo.device.host_memory import give_back_freed_memory, keep_freed_memory
from octavo.device.manager import DeviceManager
from octavo.distributed.connect import make_groups
from octavo.distributed.rendezvous import Rendezvous
from octavo.errors import InvalidParameterError
from octavo.layers.context import BuildContext
from octavo.loader.base import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.sampling.rows import SamplingRows
from octavo.worker.decode_graphs import DecodeGraphs, graph_bytes
from octavo.worker.decode_record import DecodeRecord
from octavo.worker.decode_step import DecodeStep
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.graph import StepGraph
from octavo.worker.graph_key import row_bucket
from octavo.worker.graph_uses import GraphUses
from octavo.worker.graphed_decoding import GraphedDecoding
from octavo.worker.kv_cache import KVPrefault, allocate_kv_caches, make_kv_cache_spec
from octavo.worker.memory import choose_num_blocks, sharded_config
from octavo.worker.model_runner import RankModelRunner
from octavo.worker.overlapped_runner import OverlappedRunner
from octavo.worker.profile_run import ProfileRun, measured_peaks
from octavo.worker.rank_memory import RankMemory
from octavo.worker.request_rows import RequestRows
from octavo.worker.stage_links import StageLinks
from octavo.worker.stages import stage_of
from octavo.worker.warmup import Warmup, WarmupReport

logger = logging.getLogger(__name__)

_NOBODY_ELSE = Rendezvous()


class Worker:
    """Brings one rank up, in this order: `load_model`, `count_kv_blocks`, `initialize_kv_cache`, `execute_model`.

    With several ranks, whoever made them calls the same method of all at the same time: each stage may talk to the
    others. The constructor returns when all ranks of the replica have met.
    """

    def __init__(self, config: EngineConfig, place: RankPlace = ALONE, rendezvous: Rendezvous = _NOBODY_ELSE) -> None:
        self._config = config
        self.place = place
        is_expert_parallel = config.parallel.enable_expert_parallel
        self._part = sharded_config(config.model, place, is_expert_parallel=is_expert_parallel)
        self.devices = DeviceManager(config.device, config.threads, rendezvous.local_rank)
        self._dtype = self.devices.resolve_dtype("auto", config.model.dtype)
        self._kernels = self.devices.kernels(self._dtype, config.quantization, deterministic=config.deterministic)
        self._attention = self.devices.attention(self._dtype, kv_cache_dtype=config.cache.kv_cache_dtype)
        if config.deterministic:
            self._check_deterministic()
        self._groups = make_groups(place, rendezvous, self.devices.device)
        if is_expert_parallel:
            self._groups = replace(self._groups, experts=self._groups.tensor)
        self._stage = stage_of(config.model, place)
        self._memory = RankMemory(
            config, self.devices, self._part, self._stage, self._dtype, packing_copies=self._kernels.packing_copies
        )
        self._model: CausalLM | None = None
        self._expert_loads: ExpertLoads | None = None
        self._runner: RankModelRunner | None = None
        self._kv_prefaults: dict[int, KVPrefault] = {}  # by KV group
        self._queue = self.devices.queue() if self._stage.is_whole else None

    @property
    def profile(self) -> str:
        """Device, dtype, kernels and ranks that add up, in one word: what the last bits depend on."""
        names = [self.devices.device.type, str(self._dtype).removeprefix("torch."), self._kernels.name]
        ranks = [f"tp{self.place.tp_size}"] if self.place.tp_size > 1 else []
        return "-".join([*names, self._attention.name, *ranks])

    def _check_deterministic(self) -> None:
        """Hold the kernels to `deterministic`.

        Raises:
            InvalidParameterError: a row's bits may depend on the batch with them.
        """
        unsure = [part.name for part in (self._kernels, self._attention) if not part.is_batch_invariant]
        if unsure:
            where = f"{self.devices.device.type} with {str(self._dtype).removeprefix('torch.')}"
            limit = f"false: on {where}, bits may depend on the batch in {' and '.join(unsure)}"
            raise InvalidParameterError("deterministic", True, limit)
        logger.info("deterministic: so it is with %s and %s, always", self._kernels.name, self._attention.name)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return make_kv_cache_spec(self._part, self._stage.layers, self._config.cache.block_size, self._kv_layout)

    @property
    def runner(self) -> RankModelRunner:
        assert self._runner is not None, "initialize_kv_cache comes first"
        return self._runner

    def load_model(self) -> None:
        """Read the weights.

        Raises:
            InsufficientMemoryError: before reading anything, when they cannot fit.
            CheckpointError: the files are not what the configuration promises.
        """
        start_s = time.perf_counter()
        keep_freed_memory()
        model = self._config.model
        self._memory.check_weights_fit()
        context = BuildContext(
            kernels=self._kernels,
            attention=self._attention,
            dtype=self._dtype,
            device=self.devices.device,
            groups=self._groups,
            stage=self._stage,
        )
        self._model = get_model_loader(self._config.load).load_model(model, context)
        self._expert_loads = ExpertLoads.of(self._model)
        give_back_freed_memory()  # what no step will want again
        logger.info("model %s ready in %.2f s", model.model, time.perf_counter() - start_s)

    def count_kv_blocks(self) -> list[int]:
        """Measure what memory is left; return how many KV blocks of each group there could be in it.

        Raises:
            InsufficientMemoryError: too few for one request.
        """
        config = self._config
        memory = self.measure_memory()
        return choose_num_blocks(config.model, config.cache, self.kv_cache_spec, memory, config.scheduler)

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        """Make KV memory of so many blocks of each group (the same on every rank), and the runner that uses it."""
        assert self._model is not None, "load_model comes first"
        config, spec = self._config, self.kv_cache_spec
        with_scratch = [count + extra for count, extra in zip(num_blocks, self._scratch_blocks, strict=True)]
        kv_caches = allocate_kv_caches(spec, with_scratch, self.devices.device)
        self._kv_prefaults = {
            index: KVPrefault(pools, count, self._memory.total_bytes)
            for index, (of, count) in enumerate(zip(spec.groups, with_scratch, strict=True))
            if (pools := [pool for layer in of.layers if isinstance(pool := kv_caches[layer], LayerKVCache)])
        }  # states take little memory, and use it again
        num_rows = config.scheduler.max_num_seqs + self._num_scratch
        rows = RequestRows(
            num_rows=num_rows,
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            groups=config.model.kv_groups,
            sampling=SamplingRows(
                num_rows, config.model.vocab_size, self.devices.device, processors_on_device=self._queue is not None
            ),
            device=self.devices.device,
            queue=self._queue,
        )
        if self._queue is None:
            self._runner = RankModelRunner(self._model, kv_caches, rows, self._capture_graph(kv_caches), self._links())
        else:
            graphs = self._decode_graphs(self._queue, rows, kv_caches, num_blocks)
            self._runner = OverlappedRunner(self._model, kv_caches, rows, self._queue, graphs)

    def _decode_graphs(
        self, queue: DeviceQueue, rows: RequestRows, kv_caches: Sequence[LayerCache], scratch_blocks: list[int]
    ) -> GraphedDecoding | None:
        """Return what captures steps of decoding; None where they are to be, or have to be, computed op by op."""
        assert self._model is not None
        if not self._takes_graphs:
            return None
        config, scratch_row = self._config, self._config.scheduler.max_num_seqs
        for table, scratch_block in zip(rows.block_tables, scratch_blocks, strict=True):
            table[scratch_row] = scratch_block
        record = DecodeRecord(row_bucket(scratch_row), scratch_row, scratch_blocks[0], self.devices.device)
        step = DecodeStep(self._model, kv_caches, rows, record, self._expert_loads)
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

    def _capture_graph(self, kv_caches: Sequence[LayerCache]) -> StepGraph | None:
        assert self._model is not None
        config = self._config
        if config.enforce_eager:
            return None
        max_tokens = config.scheduler.max_num_batched_tokens
        return StepGraph.capture(self._model, kv_caches, config.cache.block_size, max_tokens)

    def measure_memory(self) -> MemoryReport:
        """Report the device's memory with the weights loaded and no KV yet."""
        assert self._model is not None, "load_model comes first"
        activations, graphs = self._step_bytes(self._model)
        scratch = self.kv_cache_spec.num_bytes(self._scratch_blocks)
        return self._memory.report(self._model, activations=activations, graphs=graphs, scratch=scratch)

    def _step_bytes(self, model: CausalLM) -> tuple[int, int]:
        """Return what a step takes beside weights and KV, and what graphs take; estimated where nobody counts."""
        if self._queue is not None:
            steps = ProfileRun(model, self._config, self.kv_cache_spec)
            peaks = measured_peaks(steps, self.devices.peak_bytes)
            if peaks is not None:
                return max(peaks), graph_bytes(peaks[1]) if self._takes_graphs else 0
        return self._memory.estimated_activations, 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step."""
        model_output = self.runner.execute_model(scheduler_output)
        if self._expert_loads is None or not self.place.returns_output:
            return model_output
        return msgspec.structs.replace(model_output, expert_load=self._expert_loads.totals())

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps are worth beginning before the oldest is answered: two where the host would wait else."""
        return 1 if self._queue is None else 2

    def begin(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Launch one step; return what waits for its answer. Without a queue, that is here already."""
        if self._queue is None or not isinstance(self._runner, OverlappedRunner):
            model_output = self.execute_model(scheduler_output)
            return lambda: model_output
        wait = self._runner.begin(scheduler_output)
        if self._expert_loads is None:
            return wait
        totals = self._expert_loads.begin_totals(self._queue)
        return lambda: msgspec.structs.replace(wait(), expert_load=totals())

    def warmup(self) -> WarmupReport:
        """Run a small prefill and a few decode steps that leave no trace; return how long each took.

        Then capture the graphs that engines like this one have used before.
        """
        report = Warmup(self.runner, self._config).run()
        if isinstance(self._runner, OverlappedRunner) and self._runner.graphs is not None:
            self._runner.graphs.capture_known()
        if self._expert_loads is not None:
            self._expert_loads.reset()
        return report

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """Bring in some KV memory behind the blocks in use, for a few ms; False when enough of it is there."""
        return any(prefault.step(num_reached_blocks[group]) for group, prefault in self._kv_prefaults.items())

    @property
    def _takes_graphs(self) -> bool:
        """Whether decoding is captured. Not with several ranks, nor where attention or experts wait for the device."""
        is_capturable = self._attention.is_capturable and self.place.tp_size == 1
        if self._expert_loads is not None:
            is_capturable &= self._kernels.captures_experts
        return self._queue is not None and is_capturable and not self._config.enforce_eager

    @property
    def _num_scratch(self) -> int:
        """Rows that only padding uses."""
        return int(self._takes_graphs)

    @property
    def _scratch_blocks(self) -> list[int]:
        """Blocks of each group behind those given out: for padding, and in place of those freed behind a window."""
        windows = [of.group.sliding_window for of in self.kv_cache_spec.groups]
        return [int(self._takes_graphs or window is not None) for window in windows]

    @property
    def _kv_layout(self) -> KVLayout:
        return self._attention.kv_layout(self._config.model.head_dim)
