"""Adapters for tests of the scheduler: loads that end when the test says so, and an engine's store on top of them."""

from collections import deque
from concurrent.futures import Future

from octavo.contracts.engine import AdapterRef
from octavo.errors import CheckpointError


def adapter_of(number: int) -> AdapterRef:
    return AdapterRef(name=f"adapter {number}", path="", content_hash=f"{number + 1:x}", rank=1)


class SlowLoads:
    """Stands in for the ranks: a load is under way until `finish`. Those of `broken` fail."""

    def __init__(self, broken: frozenset[str] = frozenset()) -> None:
        self.loaded: set[str] = set()
        self.under_way: deque[tuple[AdapterRef, Future[None]]] = deque()
        self.num_loads = 0
        self.most_loaded = 0
        self._broken = broken

    def call(self, method: str, adapter: AdapterRef, evicted: list[str]) -> Future[None]:
        assert method == "load_adapter"
        self.loaded.difference_update(evicted)
        assert adapter.content_hash not in self.loaded, "loaded twice"
        self.under_way.append((adapter, Future()))
        return self.under_way[-1][1]

    def finish(self, index: int = 0) -> None:
        """End one of the loads under way."""
        adapter, done = self.under_way[index]
        del self.under_way[index]
        if adapter.content_hash in self._broken:
            done.set_exception(CheckpointError(f"{adapter.name} is broken"))
            return
        self.loaded.add(adapter.content_hash)
        self.num_loads += 1
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        done.set_result(None)
