"""Images in decisions: marks among the texts of a state, and in each prompt the images themselves, read once."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from octavo.engine.front import EngineFront
from octavo.errors import InvalidParameterError
from octavo.multimodal.media import Source, take_images
from octavo.multimodal.placeholders import Medium

OPEN, CLOSE = "\ue002", "\ue001"  # around the number of an image
MARK = f"{OPEN}\\d+{CLOSE}"
_MARK = re.compile(f"({MARK})")


class DecisionImages:
    """The images of one state. `by_name`: each with the placeholder that stands for it in any text.

    Raises InvalidParameterError: the model takes text only.
    """

    def __init__(self, front: EngineFront, by_name: Mapping[str, object]) -> None:
        self._front = front
        self._sources: list[Source] = []
        self.marks: dict[str, str] = {}  # by placeholder
        self.used: set[str] = set()  # placeholders that a text has
        for name, image in by_name.items():
            if not name:
                raise InvalidParameterError("images", name, "a placeholder, a text that is not empty, is expected")
            self.marks[name] = self._add(Source(name=f"images.{name}", content=image))

    def check_all_used(self) -> None:
        """Raises InvalidParameterError: no text has the placeholder of an image."""
        for name in self.marks.keys() - self.used:
            raise InvalidParameterError(f"images.{name}", name, "no text of the state and questions has it")

    def text_of(self, content: object, name: str, escaped: Any) -> object:
        """Return the content of a message, its parts as one text with a mark for each image.

        `escaped` makes the texts of parts harmless.
        """
        if not isinstance(content, list):
            return escaped(content)
        [message], sources = take_images([{"content": content}])
        parts: Any = message["content"]
        found, texts = iter(sources), list[str]()
        for index, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("image", "video"):
                texts.append(self._add(next(found)))
            elif kind == "text" and isinstance(part.get("text"), str):
                texts.append(str(escaped(part["text"])))
            else:
                raise InvalidParameterError(f"{name}[{index}]", kind, "a part of type text or image is expected")
        return "".join(texts)

    def parts(self, text: str) -> object:
        """Return a text with marks as the parts of a message, which its template places; without marks, as it is."""
        pieces = _MARK.split(text)
        if len(pieces) == 1:
            return text
        return [
            {"type": "image"} if number % 2 else {"type": "text", "text": piece}
            for number, piece in enumerate(pieces)
            if piece
        ]

    def numbers(self, text: str) -> list[int]:
        """Return which images a text has, in order."""
        return [number_of(mark) for mark in _MARK.findall(text)]

    @property
    def text(self) -> str:
        """What stands for an image where no template places it."""
        return self._front.inputs.multimodal.image_text

    def written(self, text: str) -> str:
        """Return a rendered text with all that stands for its images."""
        return self._front.inputs.multimodal.written(text) if self._sources else text

    def num_in(self, token_ids: Sequence[int]) -> int:
        """Return how many images have a place among tokens."""
        vision = self._front.config.model.vision
        return 0 if vision is None else sum(each == vision.image_token_id for each in token_ids)

    def prompt(self, token_ids: list[int], numbers: Sequence[int]) -> tuple[object, list[int]]:
        """Return the prompt of tokens with a place for each of these images, and all of its tokens."""
        if not numbers:
            return {"prompt_token_ids": token_ids}, token_ids
        made = self._front.inputs.multimodal.with_images(token_ids, [self._read[number] for number in numbers])
        return made, made.token_ids

    @cached_property
    def _read(self) -> list[Medium]:
        return self._front.inputs.multimodal.read_images(self._sources)

    def _add(self, source: Source) -> str:
        if not self._front.inputs.takes_images:
            raise InvalidParameterError(source.name, "an image", "this model takes text only")
        self._sources.append(source)
        return f"{OPEN}{len(self._sources) - 1}{CLOSE}"


def number_of(mark: str) -> int:
    """Return the number of the image that a mark stands for."""
    return int(mark[1:-1])
