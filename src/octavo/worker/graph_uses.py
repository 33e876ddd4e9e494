"""How often each graph was used, kept on disk: what the next start with the same model and options captures at once."""

import hashlib
import json
import logging
import os
from collections import Counter
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from octavo.loader.packed_cache import cache_folder
from octavo.worker.graph_key import Ending, GraphKey

logger = logging.getLogger(__name__)


class GraphUses:
    """Counts by key, in one small JSON file: `[num_rows, max_context, ending, uses]` each.

    The file is a hint: one that is missing or unreadable costs captures later on, and nothing else. It is written when
    a graph is captured, and whenever the counts have doubled.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts = _read(path)
        self._num_saved = self._counts.total()

    @classmethod
    def of(cls, *facts: object) -> "GraphUses":
        """Return the counts of engines of which all these facts hold: model, device, options."""
        digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]
        return cls(cache_folder("graphs") / f"{digest}.json")

    def count(self, key: GraphKey) -> None:
        """Note one use."""
        self._counts[key] += 1
        if self._counts.total() >= 2 * max(self._num_saved, 512):
            self.save()

    def most_used(self, most: int) -> list[GraphKey]:
        """Return the keys that were used, most used first."""
        return [key for key, _ in self._counts.most_common(most)]

    def save(self) -> None:
        """Write the file. Where that cannot be done, a log line says why."""
        self._num_saved = self._counts.total()
        entries = [
            [key.num_rows, key.max_context, key.ending.words(), uses] for key, uses in self._counts.most_common()
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
        logger.warning("%s is unreadable and will be made again: %s", path, error)
        return Counter()


def _parse(entry: list[Any]) -> tuple[GraphKey, int]:
    """Read one entry of the file.

    Raises:
        ValueError, TypeError: it is none.
    """
    num_rows, max_context, ending, uses = entry
    if not all(type(n) is int and n > 0 for n in (num_rows, max_context, uses)):
        raise ValueError(f"{entry} is no graph")
    return GraphKey(num_rows=num_rows, max_context=max_context, ending=Ending.of_words(ending)), uses
