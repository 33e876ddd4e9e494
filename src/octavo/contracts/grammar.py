"""The interface between the scheduler and the grammar manager, and the token masks.

Legend: M = requests with a grammar, V = vocabulary size, W = 32-bit words of one mask, at least ceil(V / 32).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.schedule import Int32Array
from octavo.errors import OctavoError


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarNews:
    """The state of requests after their latest tokens. Requests in neither field continue."""

    complete: frozenset[str] = frozenset()  # the constraint is satisfied and nothing may follow
    failed: Mapping[str, OctavoError] = field(default_factory=dict)


class Grammars(Protocol):
    """The grammars of requests, by request id. Owned by the scheduler's thread."""

    def begin(self, message: EngineCoreRequest) -> None:
        """Start compiling the request's constraint in the background."""

    def take_compiled(self) -> dict[str, OctavoError | None]:
        """Return the requests whose compilation ended since the last call, each with its error or None."""

    def masks(self, request_ids: Sequence[str]) -> Int32Array:
        """Return the allowed next tokens [M, W]: bit b of word w is token 32 w + b."""

    def advance(self, sampled: Mapping[str, int]) -> GrammarNews:
        """Advance each request by its sampled token and compute its next mask."""

    def forget(self, request_id: str) -> None:
        """Drop a request in whatever state it is. Cheap for unknown ids."""
