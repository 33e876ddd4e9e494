"""Every error that Octavo raises deliberately.

There are two families. `UserError` is a mistake in the request or the settings, which the caller can fix (HTTP 4xx,
exit code 2). `EngineError` is a failure on our side (HTTP 5xx, exit code 1). Nothing else is raised deliberately; an
`AssertionError` is a bug in Octavo.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class OctavoError(Exception):
    """Base class of all deliberate errors. They cross process boundaries whole, whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), str(self), vars(self))


class UserError(OctavoError):
    """The request or the configuration is invalid. Nothing was started and no other request is affected."""


class EngineError(OctavoError):
    """The engine failed."""


class RecordingError(EngineError):
    """A layer does something that a recorded step would not repeat."""


class InvalidParameterError(UserError, ValueError):
    """A value out of range. `field`, `value` and `limit` are attributes, for callers that word their own message."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field, self.value, self.limit = field, value, limit


class UnknownOptionError(UserError, TypeError):
    """An unknown name; the message suggests the closest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {nearest_hint(name, names)}")
        self.kind, self.name, self.known = kind, name, names


class PromptTooLongError(InvalidParameterError):
    """The prompt, or prompt plus `min_tokens`, does not fit the model's context."""


class ModelNotFoundError(UserError):
    """No such folder, and no such model on the Hub."""


class CheckpointError(UserError):
    """An unusable model folder: a missing, truncated or malformed file, a wrong shape, an unknown dtype."""


class UnsupportedModelError(UserError):
    """A valid checkpoint that this version does not support; the message lists what it supports."""


class AdapterError(UserError):
    """An adapter that cannot be served: of an unsupported kind, or not made for this model."""


class InsufficientMemoryError(UserError):
    """The model, or one request of maximum length, does not fit into the memory that Octavo may use."""


class EventLoopError(UserError, RuntimeError):
    """Something that belongs to one event loop was used in another one while the first still uses it."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"{what} is in use by another event loop: {way_out}, or make one for each loop")
        self.what, self.way_out = what, way_out


class DeviceUnavailableError(UserError):
    """The requested device is not present on this machine."""


class RequestError(EngineError):
    """One request failed; the engine and all other requests continue."""


class StepError(EngineError):
    """A forward pass failed on another rank, with that rank's message. The step's requests end; all others continue."""


class GrammarTooComplexError(UserError):
    """Compiling a structured output constraint exceeded its time or memory limit. Only this request ends."""


class GrammarError(UserError):
    """No token continues an answer in its grammar, which this vocabulary or library cannot express. It ends there."""


class EngineDeadError(EngineError):
    """The engine process has died; the message says how."""


class StateError(EngineError):
    """The state folder cannot be read or written: its disk is full, say. What was asked has not happened."""


class OutOfBlocksError(EngineError):
    """More KV blocks were requested than are free."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} KV blocks requested, {num_free} free")
        self.num_wanted, self.num_free = num_wanted, num_free


def _rebuilt(kind: type[OctavoError], message: str, attributes: Mapping[str, object]) -> OctavoError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    vars(error).update(attributes)
    return error


def anew(error: OctavoError) -> OctavoError:
    """Return an equal error, for one that is kept and raised more than once.

    A raised error holds the frames that it went through, and so all that they refer to, an engine for example.
    """
    return named_error(type(error).__name__, str(error))


def nearest_hint(name: str, known: list[str]) -> str:
    """Return "did you mean 'x'?" for the closest of `known`, or list all of them when none is close."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)


def named_error(type_name: str, message: str) -> OctavoError:
    """Rebuild an error that crossed a process boundary as its class name and message."""
    kind = globals().get(type_name)
    if isinstance(kind, type) and issubclass(kind, OctavoError):
        return _rebuilt(kind, message, {})
    return EngineDeadError(f"{type_name}: {message}")
