"""Every error that Octavo raises on purpose.

Two families, because two different people read them. `UserError` is a mistake in what was asked: the caller can mend
it (HTTP 4xx, exit code 2). `EngineError` is trouble on our side (HTTP 5xx, exit code 1). Nothing else is raised
deliberately; an `AssertionError` is a bug in Octavo itself.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class OctavoError(Exception):
    """Root of all errors raised on purpose."""


class UserError(OctavoError):
    """The request or the configuration is wrong; nothing was started and nothing else is disturbed."""


class EngineError(OctavoError):
    """The engine could not do what it should have done."""


class RecordingError(EngineError):
    """A layer does something that a recorded step would not repeat."""


class InvalidParameterError(UserError, ValueError):
    """A value outside its limits. `field`, `value` and `limit` are attributes, for callers with a text of their own."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field, self.value, self.limit = field, value, limit

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.limit)


class UnknownOptionError(UserError, TypeError):
    """A name that does not exist; the message offers the nearest one that does."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {nearest_hint(name, names)}")
        self.kind, self.name, self.known = kind, name, names

    def __reduce__(self) -> tuple[type, tuple[str, str, list[str]]]:
        return type(self), (self.kind, self.name, self.known)


class PromptTooLongError(InvalidParameterError):
    """The prompt, or prompt plus `min_tokens`, does not fit the model's context."""


class ModelNotFoundError(UserError):
    """No such folder, and no such model on the hub."""


class CheckpointError(UserError):
    """A model folder that cannot be used: a missing, truncated or malformed file, a wrong shape, an unknown dtype."""


class UnsupportedModelError(UserError):
    """A well-formed checkpoint that this version does not serve; the message names what it does serve."""


class InsufficientMemoryError(UserError):
    """The model, or one request of full length, does not fit the memory that Octavo may use."""


class DeviceUnavailableError(UserError):
    """A device was named that this machine does not have."""


class RequestError(EngineError):
    """One request failed; the others, and the engine, go on."""


class StepError(EngineError):
    """A step's forward failed on another rank; the message is what that rank said. Its requests end, others go on."""


class GrammarTooComplexError(UserError):
    """The form that an answer must have is over the limits on time or memory. Only the request that asked ends."""


class GrammarError(EngineError):
    """An answer and its grammar do not go together any more."""


class EngineDeadError(EngineError):
    """The engine process is gone; the message says how it ended."""


class OutOfBlocksError(EngineError):
    """`allocate_blocks` was asked for more than there is."""

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(f"{num_wanted} KV blocks wanted, {num_free} free")
        self.num_wanted, self.num_free = num_wanted, num_free

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.num_wanted, self.num_free)


def nearest_hint(name: str, known: list[str]) -> str:
    """Return "did you mean 'x'?" for the closest of `known`, or the list of all when none is close."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)


def named_error(type_name: str, message: str) -> OctavoError:
    """Rebuild an error that crossed a process line as its class name and its text."""
    kind = globals().get(type_name)
    if not (isinstance(kind, type) and issubclass(kind, OctavoError)):
        return EngineDeadError(f"{type_name}: {message}")
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error
