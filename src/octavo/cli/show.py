"""Prints the outputs of `octavo generate`; unstyled into a pipe."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.cli.streams import print_json_line

if TYPE_CHECKING:
    from octavo.outputs import RequestOutput


class TextStream:
    """Streams the text of one request."""

    def __init__(self) -> None:
        self._num_shown = 0

    def __call__(self, output: "RequestOutput") -> None:
        sys.stdout.write(output.text[self._num_shown :])
        sys.stdout.flush()
        self._num_shown = len(output.text)


def print_labeled(outputs: "Sequence[RequestOutput]") -> None:
    """Print several texts, each under its prompt."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for number, output in enumerate(outputs, start=1):
        for sample in output.outputs:
            name = f"{number}.{sample.index + 1}" if len(output.outputs) > 1 else str(number)
            console.print(Text(f"[{name}] {output.prompt}", style="bold cyan"))
            console.print(Text(sample.text), end="\n\n")


def print_json(outputs: "Sequence[RequestOutput]") -> None:
    """Print one line per prompt."""
    import msgspec

    for output in outputs:
        print_json_line(msgspec.json.encode(output).decode())


def print_summary(outputs: "Sequence[RequestOutput]") -> None:
    """Print the number of tokens and the speed, not counting load time."""
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    starts_s = [output.metrics.arrival_time_s for output in outputs]
    ends_s = [output.metrics.finished_time_s or time.time() for output in outputs]
    elapsed_s = max(ends_s) - min(starts_s)
    rate = num_tokens / elapsed_s
    print(f"{len(outputs)} prompts, {num_tokens} tokens, {elapsed_s:.2f} s, {rate:.0f} tokens/s", file=sys.stderr)
