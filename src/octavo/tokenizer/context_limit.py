"""`ContextLimit`: refuses prompts that do not fit a model's context."""

from dataclasses import dataclass

from octavo.errors import PromptTooLongError
from octavo.tokenizer.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 32  # more than nearly all texts have


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Of one model."""

    tokenizer: Tokenizer
    max_model_len: int  # tokens of prompt and output

    def check_text(self, text: str) -> None:
        """Refuse a text whose characters prove that it has too many tokens: counting these would take much longer.

        Raises:
            PromptTooLongError: it leaves no room for an output.
        """
        size = self.max_model_len
        while size <= len(text):  # usually its beginning proves it
            size *= _CHARACTERS_PER_TOKEN
            is_cut = size < len(text)  # its last character could be composed with a mark that follows
            if (least := self.tokenizer.min_tokens(text[:size]) - is_cut) >= self.max_model_len:
                raise self._error(f"at least {least} tokens")

    def check(self, num_tokens: int, min_tokens: int) -> None:
        """Check the length of a prompt that is tokenized, and of the least output.

        Raises:
            PromptTooLongError: they do not fit.
        """
        if num_tokens + max(1, min_tokens) > self.max_model_len:
            raise self._error(f"{num_tokens} tokens" + (f" + min_tokens {min_tokens}" if min_tokens else ""))

    def _error(self, wanted: str) -> PromptTooLongError:
        limit = f"This model's maximum context length is {self.max_model_len} tokens, prompt and output together"
        return PromptTooLongError("prompt", wanted, limit)
