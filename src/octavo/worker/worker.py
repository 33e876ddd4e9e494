"""The worker: one rank from start to end. A `RankBuilder` builds its parts; its runner executes every step."""

from concurrent.futures import Future, ThreadPoolExecutor

from octavo.config.engine import EngineConfig
from octavo.config.parallel import ALONE, RankPlace
from octavo.contracts.engine import AdapterRef
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.distributed.rendezvous import Rendezvous
from octavo.models.interfaces import CausalLM
from octavo.worker.kv_cache import KVPrefault
from octavo.worker.model_runner import RankModelRunner
from octavo.worker.rank_builder import LoadedModels, RankBuilder
from octavo.worker.warmup import Warmup

_NOBODY_ELSE = Rendezvous()


class Worker:
    """Runs one rank. Call in this order: `load_model`, `count_kv_blocks`, `initialize_kv_cache`, `begin`.

    With several ranks, call each method on all of them concurrently, as it may communicate. The constructor returns
    when all ranks of the replica have connected.
    """

    def __init__(self, config: EngineConfig, place: RankPlace = ALONE, rendezvous: Rendezvous = _NOBODY_ELSE) -> None:
        self.place = place
        self.builder = RankBuilder(config, place, rendezvous)
        self._config = self.builder.config
        self.profile = self.builder.profile
        self._loaded: LoadedModels | None = None
        self._runner: RankModelRunner | None = None
        self._adapter_loads: ThreadPoolExecutor | None = None  # one thread, with the first adapter
        self._kv_prefaults: list[tuple[int, KVPrefault]] = []  # with their KV group

    @property
    def loaded(self) -> LoadedModels:
        assert self._loaded is not None, "call load_model first"
        return self._loaded

    @property
    def model(self) -> CausalLM:
        return self.loaded.model

    @property
    def runner(self) -> RankModelRunner:
        assert self._runner is not None, "call initialize_kv_cache first"
        return self._runner

    def load_model(self) -> None:
        """Read the weights.

        Raises:
            InsufficientMemoryError: they cannot fit; raised before reading anything.
            CheckpointError: the files do not match the configuration.
        """
        self._loaded = self.builder.load_model()

    def count_kv_blocks(self) -> list[int]:
        """Measure the memory left; return how many KV blocks of each group fit into it.

        Raises:
            InsufficientMemoryError: too few for a single request.
        """
        return self.builder.count_kv_blocks(self.loaded)

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        """Allocate `num_blocks` KV blocks of each group, equal on all ranks, and build the runner that uses them."""
        self._runner, self._kv_prefaults = self.builder.build_runner(self.loaded, num_blocks)

    def warmup(self) -> None:
        """Run a small prefill and a few decode steps without side effects.

        Then capture the graphs that engines like this one used before.
        """
        Warmup(self.runner, self._config).run()
        if self.runner.graphs is not None:
            self.runner.graphs.capture_known()
        if self.runner.expert_loads is not None:
            self.runner.expert_loads.reset()

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps to begin before the oldest has finished: two if the host would otherwise wait."""
        return 1 if self.builder.queue is None else 2

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin one step; see `RankModelRunner.begin`."""
        return self.runner.begin(scheduler_output)

    def load_adapter(self, adapter: AdapterRef, evicted: list[str]) -> Future[None]:
        """Drop adapters from the host cache, by their content hashes, and read another one into it.

        In a thread, while steps go on. Slots keep their copies of those dropped, and no step fills a slot from one.
        The future raises CheckpointError or AdapterError if the files are damaged or do not fit the model.
        """
        if self._adapter_loads is None:
            self._adapter_loads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-adapters")
        return self._adapter_loads.submit(self.loaded.states.adapters.load, adapter, evicted)

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """Prefault some KV memory after the blocks in use, for a few ms; False if enough of it is present."""
        return any(prefault.step(num_reached_blocks[group]) for group, prefault in self._kv_prefaults)
