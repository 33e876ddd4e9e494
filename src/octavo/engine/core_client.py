"""`EngineCoreClient`: how the frontend reaches an engine core. `engine/front.py` chooses the implementation."""

from typing import Literal, Protocol

from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest

CoreMethod = Literal["warmup_model", "reset_prefix_cache", "check_integrity"]


class EngineCoreClient(Protocol):
    """Call `load` first. One thread may add, abort and call while another gets outputs."""

    @property
    def profile(self) -> str:
        """Device, dtype and kernels of the core: everything the exact bits of an output depend on."""
        ...

    @property
    def kv_tokens(self) -> int:
        """How many tokens of full-length requests the KV cache holds."""
        ...

    def load(self) -> None:
        """Return when the model is loaded. A core in a separate process starts loading when the client is created.

        Raises:
            UserError: about the options, the model or the memory.
        """
        ...

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Queue validated requests. Results arrive only through `get_outputs`."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """End requests before the next step; unknown ids are ignored."""
        ...

    def get_outputs(self, timeout_s: float | None) -> EngineCoreOutputs | None:
        """Return new outputs, waiting at most `timeout_s` for them (None: no limit, 0: do not wait).

        Raises:
            EngineDeadError: the core is dead.
        """
        ...

    def call(self, method: CoreMethod) -> None:
        """Call a method of the core between two steps and wait for it.

        Raises:
            EngineError: the method raised; carries its message.
        """
        ...

    def close(self) -> None:
        """Shut the core down. Idempotent."""
        ...
