"""Captured graphs of decoding: which one runs a step, when it is captured, and use counts kept across restarts.

Sizes are bucketed, so that a few graphs cover all steps. A graph is captured at its key's second use: a key may be used
only once, for example while the number of rows is changing.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from octavo.device.base import DeviceQueue
from octavo.loader.packed_cache import cache_folder
from octavo.sampling.rows import Ending

logger = logging.getLogger(__name__)

_ENDING_PARTS = ("has_processors", "is_filtered", "is_rated")

MAX_GRAPHS = 64  # held at once; each takes driver memory in addition to the shared pool


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    """One graph: for up to `num_rows` rows with contexts of up to `max_context` tokens."""

    num_rows: int
    max_context: int
    ending: Ending


def row_bucket(num_rows: int) -> int:
    """Return the number of rows that a step of `num_rows` is padded to: 1, 2, 4, multiples of 8, above 128 of 16."""
    for size in (1, 2, 4):
        if num_rows <= size:
            return size
    step = 8 if num_rows <= 128 else 16
    return -(-num_rows // step) * step


def context_bucket(num_tokens: int, max_model_len: int) -> int:
    """Return the context bound of a graph: 512 times a power of two, at most `max_model_len`.

    Kernels that split contexts launch for the bound; programs past a row's end exit immediately. A single bound would
    launch for contexts that hardly any request has.
    """
    bound = 512
    while bound < num_tokens:
        bound *= 2
    return min(bound, max_model_len)


def graph_bytes(decode_peak: int) -> int:
    """Return the memory that graphs may take: their pool, as large as the largest decode step, and the driver's.

    The driver takes an estimated 2 MiB for a graph of a few hundred launches.
    """
    return decode_peak + MAX_GRAPHS * (2 << 20)


class GraphUses:
    """Counts by key, in one small JSON file: `[num_rows, max_context, ending, uses]` each.

    The file is a hint: if missing or unreadable, graphs are captured later, nothing else. It is written when a graph is
    captured and whenever the counts have doubled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = _read(path)
        self._num_saved = self._counts.total()

    @classmethod
    def of_engine(cls, *facts: object) -> "GraphUses":
        """Return the counts of engines with these facts: model, device, options."""
        digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]
        return cls(cache_folder("graphs") / f"{digest}.json")

    def count(self, key: GraphKey) -> None:
        """Count one use."""
        self._counts[key] += 1
        if self._counts.total() >= 2 * max(self._num_saved, 512):
            self.save()

    def most_used(self, most: int) -> list[GraphKey]:
        """Return the keys used, most used first."""
        return [key for key, _ in self._counts.most_common(most)]

    def save(self) -> None:
        """Write the file; on failure, log the reason."""
        self._num_saved = self._counts.total()
        entries = [
            [key.num_rows, key.max_context, [of.kind, *(part for part in _ENDING_PARTS if getattr(of, part))], uses]
            for key, uses in self._counts.most_common()
            for of in [key.ending]
        ]
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self._path.parent, suffix=".part", delete=False) as part:
                json.dump(entries, part)
            os.replace(part.name, self._path)
        except OSError as error:
            logger.warning("the list of graphs is not kept on disk: %s", error)


def _read(path: Path) -> Counter[GraphKey]:
    try:
        return Counter(dict(map(_parse, json.loads(path.read_text()))))
    except FileNotFoundError:
        return Counter()
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is unreadable and will be recreated: %s", path, error)
        return Counter()


def _parse(entry: list[Any]) -> tuple[GraphKey, int]:
    """Parse one entry of the file. Raises ValueError, TypeError: the entry is invalid."""
    num_rows, max_context, (kind, *parts), uses = entry
    is_ending = kind in ("argmax", "drawn") and set(parts) <= set(_ENDING_PARTS)
    if not is_ending or not all(type(n) is int and n > 0 for n in (num_rows, max_context, uses)):
        raise ValueError(f"{entry} is not a graph")
    ending = Ending(kind, **dict.fromkeys(parts, True))
    return GraphKey(num_rows=num_rows, max_context=max_context, ending=ending), uses


class DecodeGraphs:
    """Owned by a runner. `run_step` launches the step of a key on static tensors, which `prepare` makes harmless."""

    def __init__(
        self, queue: DeviceQueue, run_step: Callable[[GraphKey], None], prepare: Callable[[], None], uses: GraphUses
    ) -> None:
        self._queue, self._run_step, self._prepare, self._uses = queue, run_step, prepare, uses
        self._replays: dict[GraphKey, Callable[[], None]] = {}
        self._num_seen: Counter[GraphKey] = Counter()  # in this process, of keys without a graph
        self._refused: set[GraphKey] = set()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def find(self, key: GraphKey) -> Callable[[], None] | None:
        """Return a function that replays the step of `key`, captured now if due; None: compute it op by op."""
        self._uses.count(key)
        replay = self._replays.get(key)
        if replay is not None:
            return replay
        self._num_seen[key] += 1
        is_due = self._num_seen[key] > 1 and len(self) < MAX_GRAPHS
        return self._capture(key) if is_due and key not in self._refused else None

    @torch.inference_mode()
    def capture_known(self) -> None:
        """Capture the graphs that engines like this one used before, most used first. For warm-up."""
        start_s = time.perf_counter()
        for key in self._uses.most_used(MAX_GRAPHS):
            self._capture(key)
        if self._replays:
            logger.info("%d decode graphs captured in %.2f s", len(self), time.perf_counter() - start_s)

    def _capture(self, key: GraphKey) -> Callable[[], None] | None:
        self._prepare()
        try:
            replay = self._queue.capture(partial(self._run_step, key))
        except RuntimeError:  # torch raises it for all device errors
            logger.exception("no graph of %s: such steps are computed op by op", key)
            self._refused.add(key)
            return None
        self._replays[key] = replay
        self._uses.save()
        return replay
