"""What ranks report about the KV blocks that they keep on disk."""

from typing import Literal

import msgspec


class StoreOpened(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has opened its files, or cannot use them."""

    state: Literal["open", "busy", "refused", "unsupported"]  # busy: another process has them
    reason: str = ""  # why they are refused, or nothing can be kept with these options
    slot_bytes: list[int] = []  # of each KV group: what a block takes on disk
    found: list[list[tuple[int, bytes]]] = []  # of each group: slots and the hashes of their blocks, oldest first
    is_placed: bool = False  # blocks that have been read are put in their place by another call
    damaged: dict[str, int] = {}  # blocks that cannot be used, by what is wrong


class BlocksWritten(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has written blocks, or none of them."""

    took_s: float  # of one core's time, also for the copy
    error: str = ""  # what the system said; none of them counts then
