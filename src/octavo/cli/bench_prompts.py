"""Prompts of `octavo bench`: random, and never the same twice, so that no cache ever hits."""

import random
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.errors import InvalidParameterError

if TYPE_CHECKING:
    from octavo.inputs import TokensPrompt
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams

SEED = 0
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")

Run = Callable[["SamplingParams"], "list[RequestOutput]"]


class Prompts(Protocol):
    """Prompts of one length. Adapters are used in turn."""

    llm: "LLM"
    length: int
    adapters: "Sequence[LoRARequest]"

    def take(self, count: int) -> Run:
        """Make this many prompts; return a function that runs them as one batch."""
        ...


class RandomPrompts:
    """Prompts of random ordinary tokens."""

    def __init__(self, llm: "LLM", length: int, adapters: "Sequence[LoRARequest]" = ()) -> None:
        tokenizer = llm.get_tokenizer()
        self.length, self.adapters = length, adapters
        self.llm = llm
        num_ids = min(tokenizer.vocab_size, llm.engine.front.config.model.vocab_size)
        self._ids = [id_ for id_ in range(num_ids) if id_ not in tokenizer.special_token_ids]
        self._random = random.Random(SEED)

    def take(self, count: int) -> Run:
        prompts: list[TokensPrompt] = [{"prompt_token_ids": self.tokens()} for _ in range(count)]
        lora_request = _in_turn(self.adapters, count)
        return lambda params: self.llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)

    def tokens(self) -> list[int]:
        """Return the tokens of one prompt."""
        return self._random.choices(self._ids, k=self.length)


class RandomPictures:
    """Messages with pictures of random pixels before random text, of about `length` tokens."""

    def __init__(
        self, llm: "LLM", length: int, num_images: int, size: str, adapters: "Sequence[LoRARequest]" = ()
    ) -> None:
        """Raises InvalidParameterError: `size` is not like "448x448"."""
        import numpy as np

        found = _SIZE.fullmatch(size)
        self._width, self._height = map(int, found.groups()) if found else (0, 0)
        if not self._width * self._height:
            raise InvalidParameterError("image_size", size, "a width and a height in pixels, such as 448x448")
        self.length, self.num_images, self.adapters = length, num_images, adapters
        self.llm, self._text = llm, RandomPrompts(llm, length)
        self._pixels = np.random.default_rng(SEED)

    def take(self, count: int) -> Run:
        requests = [{"messages": [{"role": "user", "content": self._content()}]} for _ in range(count)]
        lora_request = _in_turn(self.adapters, count)
        return lambda params: self.llm.generate_multimodal(requests, params, use_tqdm=False, lora_request=lora_request)

    def _content(self) -> list[dict[str, object]]:
        size = (self._height, self._width, 3)
        parts: list[dict[str, object]] = [
            {"type": "image", "image": self._pixels.integers(0, 256, size, "uint8")} for _ in range(self.num_images)
        ]
        return [*parts, {"type": "text", "text": self.llm.get_tokenizer().decode(self._text.tokens())}]


def _in_turn(adapters: "Sequence[LoRARequest]", count: int) -> "list[LoRARequest | None]":
    return [adapters[at % len(adapters)] if adapters else None for at in range(count)]
