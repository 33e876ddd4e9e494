"""The interface of a grammar library; supporting another library means adding one file.

Legend: M = matchers, W = words of one mask; bit b of word w is token 32 w + b.
"""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from octavo.contracts.schedule import Int32Array
from octavo.errors import OctavoError
from octavo.structured_output import StructuredOutput


class GrammarMatcher(Protocol):
    """The state of one output in its grammar."""

    def accept(self, token_id: int) -> None:
        """Advance by one token. Tokens outside the mask and grammars over their limits raise.

        Raises:
            GrammarError, GrammarTooComplexError: this output cannot continue.
        """

    def forced(self) -> list[int]:
        """Return next tokens that the grammar leaves no choice about; often none."""

    def copy(self) -> Self:
        """Return an independent matcher in the same state."""

    @property
    def is_complete(self) -> bool:
        """True if the output satisfies the constraint and nothing but an EOS token may follow."""


MatcherT = TypeVar("MatcherT", bound=GrammarMatcher)
MatcherT_co = TypeVar("MatcherT_co", bound=GrammarMatcher, covariant=True)


class CompiledGrammar(Protocol[MatcherT_co]):
    """A compiled grammar, shared by all requests with the same constraint."""

    def matcher(self) -> MatcherT_co:
        """Return a new matcher in the initial state."""


class GrammarBackend(Protocol[MatcherT]):
    """A grammar library set up for the model's tokenizer. Thread-safe."""

    num_words: int  # W
    end_token_ids: frozenset[int]  # allowed by a mask exactly where the output may end

    def compile(self, constraint: StructuredOutput) -> CompiledGrammar[MatcherT]:
        """Compile a constraint within limits on time and memory.

        Raises:
            InvalidParameterError: it is malformed or cannot be satisfied.
            GrammarTooComplexError: it exceeds the limits.
        """

    def fill_masks(self, matchers: Sequence[MatcherT], words: Int32Array) -> list[OctavoError | None]:
        """Write the allowed next tokens to `words` [M, W]; return errors of matchers that allow none, else None."""
