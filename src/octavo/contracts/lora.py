"""Messages and interfaces for LoRA adapters: which one a request uses, its slot on the ranks, and how it is loaded.

An adapter is identified by the hash of its files' contents. Only the frontend uses names and paths.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from octavo.errors import OctavoError

NO_SLOT = -1  # the slot of a request without an adapter


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a request. Its configuration has been read and checked against `max_lora_rank`."""

    name: str  # for messages to people
    path: str  # a folder in PEFT's format, on every host that has ranks
    content_hash: str  # SHA-256 of the configuration's and the weights' bytes, in hex
    rank: int  # the largest of any of its layers


class SlotFill(msgspec.Struct, frozen=True, kw_only=True):
    """Copy an adapter from the rank's host cache to this slot before the step; the slot's old content is unused."""

    slot: int
    content_hash: str


class AdapterEvents(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened in the host caches since the last report, by the adapters' names."""

    loads: dict[str, int] = {}
    evictions: dict[str, int] = {}


class AdapterVerbs(Protocol):
    """What every rank can do with adapters besides steps, through its executor."""

    def load_adapter(self, adapter: AdapterRef) -> Future[None]:
        """Read, check and shard an adapter into the host cache, in a thread, while steps go on.

        The future raises CheckpointError or UnsupportedModelError where the files do not fit the model, naming the
        tensor. Ranks that did not fail may have it then, until `evict_adapter`.
        """
        ...

    def evict_adapter(self, content_hash: str) -> None:
        """Drop an adapter from the host cache; no-op on ranks that do not have it. Slots keep their copies.

        Ranks carry out steps and evictions in the order they were sent: steps in flight still find the adapter.
        """
        ...


class AdapterStore(Protocol):
    """The adapters in the ranks' host caches, by content hash. Owned by the scheduler's thread."""

    @property
    def has_room(self) -> bool:
        """Whether `begin` has a place for an adapter that is not in the cache."""
        ...

    def begin(self, adapter: AdapterRef) -> bool:
        """Load an adapter if necessary, and keep it; return False while all places are taken by other kept adapters."""
        ...

    def has(self, content_hash: str) -> bool:
        """Return whether the adapter is loaded on all ranks."""
        ...

    def release(self, content_hash: str) -> None:
        """No longer keep an adapter. It stays until its place is needed."""
        ...

    def take_failed(self) -> Sequence[tuple[str, OctavoError]]:
        """Return the adapters, among those to keep, whose loading has failed since the last call, with the error."""
        ...
