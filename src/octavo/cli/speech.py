"""Pieces of a response, and how a terminal shows them."""

import sys
from dataclasses import dataclass

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Speech:
    """A piece of a response, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class SpeechPrinter:
    """Streams one response with dimmed reasoning, and collects the text that belongs to the conversation."""

    def __init__(self) -> None:
        self._can_dim = sys.stdout.isatty()
        self._was_reasoning = False
        self._said: list[str] = []

    @property
    def said(self) -> str:
        """The response so far, without reasoning, which is not sent back to models."""
        return "".join(self._said)

    def show(self, speech: Speech) -> None:
        if self._was_reasoning and not speech.is_reasoning:
            print("\n")
        self._was_reasoning = speech.is_reasoning
        if not speech.is_reasoning:
            self._said.append(speech.text)
        is_dim = speech.is_reasoning and self._can_dim
        print(f"{_DIM}{speech.text}{_PLAIN}" if is_dim else speech.text, end="", flush=True)
