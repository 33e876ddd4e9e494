"""What a grammar library must do for us. One protocol, so that another library is one more file.

Legend: M = matchers, W = words of one mask; bit b of word w stands for token 32 w + b.
"""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from octavo.contracts.schedule import Int32Array
from octavo.errors import OctavoError
from octavo.structured_output import StructuredOutput


class GrammarMatcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, token_id: int) -> None:
        """Go on by one token. A token that the mask did not allow, and a grammar over its limits, raise.

        Raises:
            GrammarError, GrammarTooComplexError: this answer cannot go on.
        """

    def copy(self) -> Self:
        """Return a matcher that stands at the same place and goes its own way."""

    @property
    def is_complete(self) -> bool:
        """True when the form is complete and nothing but an end token may follow."""


MatcherT = TypeVar("MatcherT", bound=GrammarMatcher)
MatcherT_co = TypeVar("MatcherT_co", bound=GrammarMatcher, covariant=True)


class CompiledGrammar(Protocol[MatcherT_co]):
    """A grammar that is ready; shared by all requests with the same form."""

    def matcher(self) -> MatcherT_co:
        """Return a new matcher at the start of an answer."""


class GrammarBackend(Protocol[MatcherT]):
    """A grammar library that knows the model's tokenizer. Safe to use from several threads."""

    num_words: int  # W
    end_token_ids: frozenset[int]  # allowed by a mask exactly where the form may be complete

    def compile(self, form: StructuredOutput) -> CompiledGrammar[MatcherT]:
        """Compile a form, within limits on time and memory.

        Raises:
            InvalidParameterError: no answer has this form, or it is malformed.
            GrammarTooComplexError: it is over the limits.
        """

    def fill_masks(self, matchers: Sequence[MatcherT], words: Int32Array) -> list[OctavoError | None]:
        """Write which tokens may come next into `words` [M, W]; say for each matcher why none may, if so."""
