"""The grammar backend on llguidance: Earley parsing over a lexer of lazily computed regex derivatives.

Nothing is expanded in advance, so a huge count in a schema costs nothing and the limits below are on actual work. The
library releases the GIL while it compiles and while it computes masks.

It spells text that a grammar forces with the `tokenizers` library, which would read `<think>` in a user's string as the
token of that name, which no grammar allows there. Only a tokenizer of the caller's own, written in Python, can be told
to read special tokens as text: `_Spelling`, which is called for forced text alone.

Legend: M = matchers, W = words of one mask.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par
from tokenizers import Tokenizer

from octavo.contracts.schedule import Int32Array
from octavo.errors import GrammarError, GrammarTooComplexError, InvalidParameterError, OctavoError, UserError
from octavo.structured.grammar_text import Vocabulary, whole_grammar
from octavo.structured_output import StructuredOutput


def _limits(max_lexer_states: int) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=100_000,  # 7 ms
        step_max_items=50_000,  # 3 ms
        max_lexer_states=max_lexer_states,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


_LIMITS = _limits(16_384)  # 16 to 32 MiB
_LONG_LIMITS = _limits(98_304)  # a counted string takes up to a dozen states of 0.5 KiB for each character
_LONG_COUNT = re.compile(r'(?:Length\\?": ?|[{,])[0-9]{4,}')
_INNER_ERROR = re.compile(r"^error: (.*)$", re.MULTILINE)
_REFUSAL = "doesn't satisfy the grammar"  # the library's message for a rejected token; all other errors are limits
_NOTHING_FOLLOWS = "NoExtensionBias"  # the library's name for a dead end
_NUM_THREADS = 4  # computing the masks of a step
_SPECIAL = b"\xff"  # the library's mark of tokens that text cannot produce


class LLGuidanceMatcher:
    """The state of one output in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def accept(self, token_id: int) -> None:
        """Advance by one token; GrammarError or GrammarTooComplexError if this output cannot continue."""
        if self.matcher.consume_token(token_id):
            return
        problem = _first_line(self.matcher)
        if _REFUSAL in problem:
            raise GrammarError(f"token {token_id} does not match the grammar: {problem}")
        raise GrammarTooComplexError(f"structured_output: {problem}")

    def forced(self) -> list[int]:
        """Return next tokens that the grammar leaves no choice about; often none."""
        token_ids: list[int] = self.matcher.compute_ff_tokens()
        return token_ids

    @property
    def dead_end(self) -> OctavoError | None:
        """Why no token may come next; None if one may or the output is complete."""
        if (problem := _first_line(self.matcher)) == _NOTHING_FOLLOWS:
            return GrammarError("the grammar allows no next token")
        return GrammarTooComplexError(f"structured_output: {problem}") if self.matcher.is_error() else None

    def copy(self) -> "LLGuidanceMatcher":
        return LLGuidanceMatcher(self.matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        """True if the output satisfies the constraint and nothing but an EOS token may follow."""
        return self.matcher.is_stopped() and self.matcher.is_accepting()


class LLGuidanceBackend:
    """llguidance set up for one tokenizer. Thread-safe.

    `tokenizer_json` is the content of a `tokenizer.json`, `num_tokens` its largest id plus one, `added_tokens` ids by
    text. `vocab_size` is that of the logits; ids beyond the tokenizer are never allowed. Raises UserError: the library
    does not support this kind of tokenizer.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        num_tokens: int,
        vocab_size: int,
        added_tokens: dict[str, int],
        end_token_ids: Iterable[int],
    ) -> None:
        ends = sorted({token_id for token_id in end_token_ids if token_id < num_tokens}) or None
        size = max(vocab_size, num_tokens)
        try:
            library = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=ends, slices=[])
            plain = Tokenizer.from_str(json.dumps(_without_lead(json.loads(tokenizer_json), library)))
            plain.encode_special_tokens = True  # all text is spelled in ordinary tokens
            self._tokenizer = LLTokenizer(TokenizerWrapper(_Spelling(library, plain)), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise UserError(f"structured output does not support this model's tokenizer: {error}") from error
        self.num_words = -(-self._tokenizer.vocab_size // 32)
        self.end_token_ids = frozenset(self._tokenizer.eos_tokens)
        special = {text: id_ for text, id_ in added_tokens.items() if self._tokenizer.is_special_token(id_)}
        self._vocabulary = Vocabulary(num_tokens=num_tokens, special_tokens=special, end_token_ids=self.end_token_ids)
        self._executor = LLExecutor(_NUM_THREADS)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token according to the library."""
        return self._tokenizer.decode_bytes([token_id])

    def compile(self, constraint: StructuredOutput) -> LLGuidanceMatcher:
        """Compile a constraint; return its initial state, to be copied.

        InvalidParameterError: it is malformed or cannot be satisfied. GrammarTooComplexError: it exceeds the limits.
        """
        text = whole_grammar(constraint, self._vocabulary)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_limits_of(text))
        matcher.compute_bitmask()  # the first mask costs the most, and reveals grammars that match nothing
        field = f"structured_output.{constraint.kind}"
        if _first_line(matcher) == _NOTHING_FOLLOWS:
            raise InvalidParameterError(field, "...", "no output can satisfy it")
        if matcher.is_error():
            raise GrammarTooComplexError(f"{field}: {_first_line(matcher)}")
        return LLGuidanceMatcher(matcher)

    def fill_masks(self, matchers: Sequence[LLGuidanceMatcher], words: Int32Array) -> list[OctavoError | None]:
        """Write the allowed next tokens to `words` [M, W]; return errors of matchers that allow none, else None.

        Bit b of word w is token 32 w + b.
        """
        assert words.shape == (len(matchers), self.num_words)
        if len(matchers) == 1:  # for one mask, waking other threads costs more than it saves
            matchers[0].matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        else:
            fill_next_token_bitmask_par(self._executor, [(m.matcher, i) for i, m in enumerate(matchers)], words)
        return [matcher.dead_end for matcher in matchers]


def validate(grammar: str) -> str | None:
    """Return what is wrong with a grammar, whatever the tokenizer, in one line; None if it is valid."""
    has_failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits_of(grammar))
    if not has_failed:
        return None
    innermost = _INNER_ERROR.findall(messages[0])  # followed by a drawing of the location
    return _shortened(innermost[-1] if innermost else messages[0].partition("\n")[0])


def _limits_of(grammar: str) -> LLParserLimits:
    return _LIMITS if _LONG_COUNT.search(grammar) is None else _LONG_LIMITS


def _first_line(matcher: LLMatcher) -> str:
    return _shortened(matcher.get_error().partition("\n")[0])


def _shortened(text: str) -> str:
    """Shorten an error, which may quote its whole subject."""
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


class _Spelling:
    """What `TokenizerWrapper` expects of a tokenizer: token bytes by id, and a function from text to ids."""

    bos_token_id = None

    def __init__(self, library: LLTokenizer, tokenizer: Tokenizer) -> None:
        self.eos_token_id = library.eos_token
        self.tokens = [_bytes_of(library, token_id) for token_id in range(library.vocab_size)]
        self._special = frozenset(filter(library.is_special_token, range(library.vocab_size)))
        self._library, self._tokenizer = library, tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # the wrapper's question whether bytes are accepted, too
            raise TypeError("text is expected")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._special.isdisjoint(ids):
            return ids
        return self._library.greedy_tokenize(text)  # the vocabulary proper has a piece of that name, too


def _bytes_of(library: LLTokenizer, token_id: int) -> bytes:
    text = library.decode_bytes([token_id])
    if library.is_special_token(token_id):
        return _SPECIAL + text
    return b"" if text == b"<[%d]>" % token_id else text  # how the library shows an id without a token


def _without_lead(tree: dict[str, Any], library: LLTokenizer) -> dict[str, Any]:
    """Change a `tokenizer.json` so that text does not begin with an added space, as the library does.

    What the library takes for special, such as `<think>`, must be marked as special.
    """
    for token in tree.get("added_tokens") or []:
        token["special"] = library.is_special_token(token["id"])
    tree["normalizer"] = _without_prepend(tree.get("normalizer"))
    for step in _steps(tree.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace":
            step.pop("add_prefix_space", None)
            step["prepend_scheme"] = "never"
    return tree


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    inner = [kept for step in normalizer["normalizers"] if (kept := _without_prepend(step)) is not None]
    return {"type": "Sequence", "normalizers": inner} if inner else None


def _steps(node: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer, of nested sequences too."""
    if node is None:
        return []
    return [step for inner in node[name] for step in _steps(inner, name)] if node["type"] == "Sequence" else [node]
