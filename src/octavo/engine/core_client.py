"""`EngineCoreClient`: how the frontend reaches an engine core. `make_client` chooses the implementation."""

from typing import Any, Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import CoreReady, EngineCoreOutputs, EngineCoreRequest


class EngineCoreClient(Protocol):
    """Call `load` first. One thread may add, abort and call while another gets outputs."""

    @property
    def outages(self) -> dict[int, str]:
        """Why replicas compute nothing now, by their number. Their requests go on elsewhere, or wait."""

    def load(self) -> CoreReady:
        """Return when the model is loaded. A core in a separate process starts loading when the client is created.

        Raises UserError: about the options, the model or the memory.
        """

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Queue validated requests. Results arrive only through `get_outputs`."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests before the next step; unknown ids are ignored."""

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        """Return new outputs, waiting at most `timeout_s` (None: no limit). Raises EngineDeadError."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the core between two steps; return its value, one for each replica of the model.

        Arguments and values are plain ones: what msgpack can carry.

        Raises OctavoError: what the method raised; EngineError with type and message where that is no error of ours.
        """

    def close(self) -> None:
        """Shut the core down. Idempotent."""


def make_client(config: EngineConfig, *, own_process: bool) -> EngineCoreClient:
    """Return a client whose core is not loaded yet. Imports only the one it needs: each has heavy dependencies."""
    if own_process or config.parallel.data_parallel_size > 1:
        from octavo.engine.process_client import ProcessClient

        return ProcessClient(config)
    from octavo.engine.inproc_client import InprocClient

    return InprocClient(config)
