"""What is measured of an engine, defined once for all: an engine only says when each of its tokens arrived.

`decode:B:N`     tokens per second of B requests with prompts of N tokens, over the stretch in which all B decode
`prefill:N`      tokens per second of one prompt of N tokens, up to its first answer

Beside the cells, every process says `start_s`, seconds from the command to the first token of a prompt of 128, and
`peak_bytes`, the most resident memory it had (VmHWM) after all its cells.

Imports nothing beyond the standard library: it runs in the environment of every peer.
"""

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

NUM_OUT = 64
SETTLING = 3  # tokens of each request that no figure counts: primitives are made and graphs recorded there
FIRST_ID, LAST_ID = 1000, 150_000

Arrivals = list[list[float]]  # of each request, when each of its tokens was there: seconds after all were submitted


class Engine(Protocol):
    """A peer, loaded and ready for `capacity` of the cell that asks most."""

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """Continue every prompt greedily by exactly `num_out` tokens, all submitted at once."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure: `num_requests` prompts of `num_in` tokens, continued by `num_out`."""

    kind: str
    num_requests: int
    num_in: int
    num_out: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `decode:8:128` or `prefill:1024`.

        Raises:
            ValueError: for anything else.
        """
        kind, *sizes = text.split(":")
        if kind == "decode" and len(sizes) == 2:
            return cls(kind=kind, num_requests=int(sizes[0]), num_in=int(sizes[1]), num_out=NUM_OUT)
        if kind == "prefill" and len(sizes) == 1:
            return cls(kind=kind, num_requests=1, num_in=int(sizes[0]), num_out=1)
        raise ValueError(f"{text!r} is no cell: decode:8:128, prefill:1024")

    @property
    def num_tokens(self) -> int:
        """Tokens of one request, prompt and answer."""
        return self.num_in + self.num_out

    def prompts(self) -> list[list[int]]:
        """Random prompts, the same in every engine."""
        source = random.Random(self.num_requests * 100_003 + self.num_in)
        return [[source.randint(FIRST_ID, LAST_ID) for _ in range(self.num_in)] for _ in range(self.num_requests)]


def vocabulary(size: int) -> list[str]:
    """Return the tokens of a GGUF file: a letter for every byte, then words nobody says."""
    return [*(chr(code) for code in range(256, 512)), *(f"w{token_id}" for token_id in range(256, size))]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What an engine must have room for."""

    num_requests: int  # at once
    num_tokens: int  # of one request
    total_tokens: int  # of all requests at once

    @classmethod
    def of(cls, cells: list[Cell]) -> Self:
        """Return the room for the largest of each."""
        return cls(
            num_requests=max(cell.num_requests for cell in cells),
            num_tokens=max(cell.num_tokens for cell in cells),
            total_tokens=max(cell.num_requests * cell.num_tokens for cell in cells),
        )


def measure(engine: Engine, cell: Cell) -> float:
    """Return tokens per second.

    Memory that nobody has touched before costs more than computing on it, so a prefill has a run of its size before it;
    a decode begins after its own prefill and `SETTLING` tokens.
    """
    if cell.kind == "decode":
        return steady_rate(engine.generate(cell.prompts(), cell.num_out))
    engine.generate(cell.prompts(), cell.num_out)
    [[first_s]] = engine.generate(cell.prompts(), cell.num_out)
    return cell.num_in / first_s


def steady_rate(arrivals: Arrivals) -> float:
    """Return the tokens per second of the stretch in which every request is decoding.

    It begins when the last request has settled and ends when the first one ends: no prefill and no half-empty batch.
    """
    begin_s = max(times[SETTLING] for times in arrivals)
    end_s = min(times[-1] for times in arrivals)
    num_tokens = sum(begin_s < time_s <= end_s for times in arrivals for time_s in times)
    return num_tokens / (end_s - begin_s)


FIRST = Cell(kind="prefill", num_requests=1, num_in=128, num_out=1)


def time_start(engine: Engine, begun_s: float) -> float:
    """Answer one prompt; return how long after `begun_s` (time.time) its token came."""
    engine.generate(FIRST.prompts(), FIRST.num_out)
    return time.time() - begun_s


def peak_bytes() -> int:
    """Return the most resident memory that this process ever had.

    From /proc, as `getrusage` also counts the parent's memory from before exec.
    """
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def emit(results: dict[str, float]) -> None:
    """Hand the results to the process that asked for them, on the last line of the output."""
    print("\n" + json.dumps(results), flush=True)
