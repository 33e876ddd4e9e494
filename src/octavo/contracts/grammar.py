"""The interface between the scheduler and the grammar manager, and the token masks.

Legend: M = requests under a grammar, V = vocabulary size, W = words of one mask, ceil(V / 32) or more, K = drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.schedule import Int32Array
from octavo.errors import OctavoError


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarUpdate:
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

    def masks_along(self, request_id: str, draft_ids: Sequence[int]) -> Int32Array:
        """Return which tokens may come next and after each draft: [1 + K', W]. The request's state does not change.

        The first K' of K drafts are usable: the grammar accepts each of them and is not complete after it.
        """

    def forced(self, request_id: str) -> list[int]:
        """Return next tokens that the grammar leaves no choice about, as its tokenizer would spell them; often none."""

    def advance(self, sampled: Mapping[str, Sequence[int]]) -> GrammarUpdate:
        """Advance these requests by their sampled tokens and compute their next masks."""

    def forget(self, request_id: str) -> None:
        """Drop a request in any state. Cheap for unknown ids."""
