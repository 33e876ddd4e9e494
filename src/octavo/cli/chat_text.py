"""Pieces of a response, and how a terminal shows them."""

import sys
from dataclasses import dataclass

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class ResponsePiece:
    """A piece of a response, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class ResponsePrinter:
    """Streams one response with dimmed reasoning, and collects the text that belongs to the conversation."""

    def __init__(self) -> None:
        self._can_dim = sys.stdout.isatty()
        self._was_reasoning = False
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """The response so far, without reasoning, which is not sent back to models."""
        return "".join(self._shown)

    def show(self, piece: ResponsePiece) -> None:
        if self._was_reasoning and not piece.is_reasoning:
            print("\n")
        self._was_reasoning = piece.is_reasoning
        if not piece.is_reasoning:
            self._shown.append(piece.text)
        is_dim = piece.is_reasoning and self._can_dim
        print(f"{_DIM}{piece.text}{_PLAIN}" if is_dim else piece.text, end="", flush=True)
