"""The worker: one rank from start to end. Its parts come from a `RankBuilder`; every step goes to its runner."""

from concurrent.futures import Future

from octavo.config.engine import EngineConfig
from octavo.config.parallel import ALONE, RankPlace
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.distributed.rendezvous import Rendezvous
from octavo.models.interfaces import CausalLM
from octavo.worker.kv_cache import KVPrefault
from octavo.worker.model_runner import RankModelRunner
from octavo.worker.overlapped_runner import OverlappedRunner
from octavo.worker.rank_builder import RankBuilder
from octavo.worker.warmup import Warmup

_NOBODY_ELSE = Rendezvous()


class Worker:
    """Brings one rank up, in this order: `load_model`, `count_kv_blocks`, `initialize_kv_cache`, `begin`.

    With several ranks, whoever made them calls the same method of all at the same time: each stage may talk to the
    others. The constructor returns when all ranks of the replica have met.
    """

    def __init__(self, config: EngineConfig, place: RankPlace = ALONE, rendezvous: Rendezvous = _NOBODY_ELSE) -> None:
        self._config, self.place = config, place
        self.builder = RankBuilder(config, place, rendezvous)
        self.profile = self.builder.profile
        self._model: CausalLM | None = None
        self._runner: RankModelRunner | None = None
        self._kv_prefaults: dict[int, KVPrefault] = {}  # by KV group

    @property
    def model(self) -> CausalLM:
        assert self._model is not None, "load_model comes first"
        return self._model

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
        self._model = self.builder.load_model()

    def count_kv_blocks(self) -> list[int]:
        """Measure what memory is left; return how many KV blocks of each group there could be in it.

        Raises:
            InsufficientMemoryError: too few for one request.
        """
        return self.builder.count_kv_blocks(self.model)

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        """Make KV memory of so many blocks of each group (the same on every rank), and the runner that uses it."""
        self._runner, self._kv_prefaults = self.builder.build_runner(self.model, num_blocks)

    def warmup(self) -> None:
        """Run a small prefill and a few decode steps that leave no trace.

        Then capture the graphs that engines like this one have used before.
        """
        Warmup(self.runner, self._config).run()
        if isinstance(self.runner, OverlappedRunner) and self.runner.graphs is not None:
            self.runner.graphs.capture_known()
        if self.runner.expert_loads is not None:
            self.runner.expert_loads.reset()

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps are worth beginning before the oldest is answered: two where the host would wait else."""
        return 1 if self.builder.queue is None else 2

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin one step; see `RankModelRunner.begin`."""
        return self.runner.begin(scheduler_output)

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """Prefault some KV memory behind the blocks in use, for a few ms; False when enough of it is there."""
        return any(prefault.step(num_reached_blocks[group]) for group, prefault in self._kv_prefaults.items())
