"""What crosses the process line between a client and its engine core, in both directions."""

import msgspec

from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest


class AddRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Queue requests that the front has validated."""

    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End requests before the next step; unknown ids are ignored."""

    request_ids: list[str]


class CallMethod(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run a method of the core that takes and returns nothing but plain values."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Finish nothing, close and exit with code 0."""


ToCore = AddRequests | AbortRequests | CallMethod | Shutdown


class CoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded; messages sent before this one are kept."""

    profile: str  # of `Executor`


class CoreFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core could not start or cannot go on. `error_type` is a class of `octavo.errors`, or any other name."""

    error_type: str
    message: str


class CallResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A method of the core has run; `error` says what it raised."""

    call_id: int
    error: str | None = None


FromCore = EngineCoreOutputs | CoreReady | CoreFailed | CallResult
