"""How the front reaches an engine core: load, add, abort, get outputs, call, close."""

from typing import Literal, Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest

CoreMethod = Literal["warmup_model", "reset_prefix_cache", "check_integrity"]


class EngineCoreClient(Protocol):
    """Six verbs, the first of them before the others. One thread may add, abort and call while another gets outputs."""

    @property
    def profile(self) -> str:
        """Device, dtype and kernels of the core: what the last bits of an answer depend on."""
        ...

    def load(self) -> None:
        """Return when the model is loaded. A core in a process of its own has been loading since the client was made.

        Raises:
            UserError: about the options, the model or the memory.
        """
        ...

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Queue requests. They were validated; nothing is answered but by outputs."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """End requests before the next step; unknown ids are ignored."""
        ...

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        """Return what is new, waiting at most `timeout_s` (None: as long as it takes, 0: not at all) for something.

        Raises:
            EngineDeadError: the core is gone.
        """
        ...

    def call(self, method: CoreMethod) -> None:
        """Run a method of the core between two steps, and wait for it.

        Raises:
            EngineError: what the method raised, in words.
        """
        ...

    def close(self) -> None:
        """Let the core go. May be called twice."""
        ...


def make_client(config: EngineConfig, *, own_process: bool) -> EngineCoreClient:
    """Return a client whose core is yet to `load`. Imported here: a core in this process brings torch along."""
    if config.parallel.data_parallel_size > 1:
        from octavo.engine.data_parallel_client import DataParallelClient

        return DataParallelClient(config)
    if own_process:
        from octavo.engine.process_client import ProcessClient

        return ProcessClient(config)
    from octavo.engine.inproc_client import InprocClient

    return InprocClient(config)
