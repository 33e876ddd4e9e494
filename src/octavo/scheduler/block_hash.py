"""Names for full KV blocks, by content: equal prefixes get equal names, in every process and on every machine.

A block's KV depends on all tokens before it, so its name is H(name of the block before, its own tokens). The chain
starts from a root that also takes in whatever else the KV depends on (an adapter, an image) or must not be shared
across (a tenant's salt). SHA-256, because a collision would show one tenant another's text.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from octavo.contracts.schedule import Int32Array

_DOMAIN = b"octavo kv block 1"


def root_hash(extra_keys: Iterable[str] = ()) -> bytes:
    """Return the parent of a first block. `extra_keys` are length-prefixed, so no two lists can run together."""
    digest = hashlib.sha256(_DOMAIN)
    for key in extra_keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Int32Array) -> bytes:
    """Return the name of a full block that holds `token_ids` [block_size] after `parent`."""
    return hashlib.sha256(parent + token_ids.astype("<i4", copy=False).tobytes()).digest()


def prefix_hashes(root: bytes, token_ids: Int32Array, block_size: int, max_blocks: int) -> Iterable[bytes]:
    """Yield the names of the first full blocks of `token_ids`, at most `max_blocks`, one at a time."""
    parent = root
    for index in range(min(max_blocks, len(token_ids) // block_size)):
        parent = block_hash(parent, np.asarray(token_ids[index * block_size : (index + 1) * block_size]))
        yield parent
