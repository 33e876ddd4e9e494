"""`Infill`: prompts for what stands between two texts, of models that were trained to fill it in (code models mostly).

Arranged as in training: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle", with the
control tokens of each family. A model has the ability if its vocabulary has the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octavo.errors import InvalidParameterError
from octavo.tokenizer.tokenizer import Tokenizer

# The tokens before what precedes the hole, before what follows it, and before what fills it.
_PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001 - these are its bars
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, CodeGeeX
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_SUFFIX_FIRST = (
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
)
# What models write behind the middle, beside their tokens for the end of a text: the end, or the next file.
_ENDS = ("▁<EOT>", "<EOT>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<repo_name>", "<reponame>",
         "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Infill:
    """How one model is asked. Token ids."""

    prefix: int
    suffix: int
    middle: int | None  # None: what fills the hole follows at once
    is_suffix_first: bool
    ends: tuple[int, ...]  # that end what fills the hole, beside the model's own

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return how the model of this tokenizer is asked; None: it has no tokens for it."""
        for is_suffix_first, family in ((False, _PREFIX_FIRST), (True, _SUFFIX_FIRST)):
            for names in family:
                prefix, suffix, middle = (None if name is None else tokenizer.token_id(name) for name in names)
                if prefix is None or suffix is None or (middle is None and names[2] is not None):
                    continue
                ends = {prefix, suffix, middle, *map(tokenizer.token_id, _ENDS)}
                return cls(prefix=prefix, suffix=suffix, middle=middle, is_suffix_first=is_suffix_first,
                           ends=tuple(sorted(each for each in ends if each is not None)))  # fmt: skip
        return None

    def prompt(self, tokenizer: Tokenizer, before: str | Sequence[int], after: str) -> list[int]:
        """Return the ids that ask for what stands between two texts; control tokens spelled out in them are text.

        Raises InvalidParameterError: a text has lone surrogates.
        """
        head = [self.prefix, *(tokenizer.encode_plain(before) if isinstance(before, str) else before)]
        tail = [self.suffix, *_continued(tokenizer, after)]
        begin = [each for each in tokenizer.encode("") if each == tokenizer.bos_token_id]
        parts = [*tail, *head] if self.is_suffix_first else [*head, *tail]
        return [*begin, *parts, *(() if self.middle is None else (self.middle,))]


def _continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that something precedes: without the space that some tokenizers put before a text."""
    if not text:
        return []
    line_break = tokenizer.encode_plain("\n")
    try:
        ids = tokenizer.encode_plain("\n" + text if len(line_break) > 1 else text)
    except InvalidParameterError as error:
        raise InvalidParameterError("suffix", text, error.limit) from error
    return ids[len(line_break) :] if len(line_break) > 1 else ids
