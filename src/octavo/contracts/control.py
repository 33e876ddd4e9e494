"""Messages between a client and its engine core, in both directions."""

import msgspec

from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest


class AddRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Queue validated requests."""

    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Abort requests before the next step; unknown ids are ignored."""

    request_ids: list[str]


class CallMethod(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call a method of the core whose arguments and result are plain values."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Exit with code 0 without finishing running requests."""


ToCore = AddRequests | AbortRequests | CallMethod | Shutdown


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded. Messages sent earlier are kept."""

    profile: str  # see `Executor.profile`
    kv_tokens: int  # see `capacity_tokens`


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core could not start or cannot continue. `error_type` is the name of any exception class."""

    error_type: str
    message: str


class CallResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A method of the core has returned, or raised `error`."""

    call_id: int
    error: str | None = None


FromCore = EngineCoreOutputs | CoreReady | CoreFailed | CallResult
