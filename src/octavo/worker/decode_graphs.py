"""Captured graphs by key: made at a key's second use, remembered on disk, made again at the next start.

A first use may be the only one: a prompt's last moments, an odd number of rows on the way to another.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

from octavo.device.device_queue import DeviceQueue
from octavo.worker.graph_key import GraphKey
from octavo.worker.graph_uses import GraphUses

logger = logging.getLogger(__name__)

_USES_BEFORE_CAPTURE = 1
MAX_GRAPHS = 64  # held at once; each takes memory of the driver beside the pool that all share
_BYTES_PER_GRAPH = 2 << 20  # of a few hundred launches; an estimate


def graph_bytes(decode_peak: int) -> int:
    """Return what graphs may take: their own pool, as large as the largest step of decoding, and the driver's part."""
    return decode_peak + MAX_GRAPHS * _BYTES_PER_GRAPH


class DecodeGraphs:
    """Owned by a runner, which makes the step of a key: `make_step` returns what launches it on its static tensors."""

    def __init__(
        self,
        queue: DeviceQueue,
        make_step: Callable[[GraphKey], Callable[[], None]],
        uses: GraphUses,
    ) -> None:
        self._queue, self._make_step, self._uses = queue, make_step, uses
        self._replays: dict[GraphKey, Callable[[], None]] = {}
        self._num_seen: Counter[GraphKey] = Counter()  # in this process, of keys without a graph
        self._refused: set[GraphKey] = set()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def find(self, key: GraphKey, prepare: Callable[[], None]) -> Callable[[], None] | None:
        """Return what replays the step of `key`, captured now if it is time; None: compute it op by op.

        `prepare` makes the static tensors harmless, which a capture wants.
        """
        self._uses.count(key)
        replay = self._replays.get(key)
        if replay is not None:
            return replay
        self._num_seen[key] += 1
        is_due = self._num_seen[key] > _USES_BEFORE_CAPTURE and len(self) < MAX_GRAPHS
        return self._capture(key, prepare) if is_due and key not in self._refused else None

    def capture_known(self, prepare: Callable[[], None]) -> None:
        """Capture what an engine like this one used before, most used first. For warm-up."""
        start_s = time.perf_counter()
        for key in self._uses.most_used(MAX_GRAPHS):
            self._capture(key, prepare)
        if self._replays:
            logger.info("%d decode graphs captured in %.2f s", len(self), time.perf_counter() - start_s)

    def _capture(self, key: GraphKey, prepare: Callable[[], None]) -> Callable[[], None] | None:
        prepare()
        try:
            replay = self._queue.capture(self._make_step(key))
        except RuntimeError:  # torch's word for whatever a device refuses
            logger.exception("no graph of %s: such steps are computed op by op", key)
            self._refused.add(key)
            return None
        self._replays[key] = replay
        self._uses.save()
        return replay
