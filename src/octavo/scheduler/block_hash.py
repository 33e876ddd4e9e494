"""Hashes of full KV blocks, by content: equal prefixes get equal hashes, in every process and on every machine.

A block's KV depends on all tokens before it, so its hash is H(hash of the previous block, its own tokens, its key). The
chain starts from a root that covers whatever else the KV depends on, or must not be shared across: the message's
`prefix_keys`. SHA-256, because a collision would show one tenant another's text.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from octavo.contracts.schedule import Int32Array

BlockKeys = Mapping[int, bytes]  # by a block's number in its context: what its hash covers besides tokens
NO_KEYS: BlockKeys = MappingProxyType({})


def root_hash(keys: Iterable[str] = ()) -> bytes:
    """Return the parent of a first block. `keys` are length-prefixed, so no two lists can collide."""
    digest = hashlib.sha256(b"octavo kv block 1")
    for key in keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_hash(parent: bytes, token_bytes: bytes, key: bytes = b"") -> bytes:
    """Return the hash of a full block after `parent`; `token_bytes` are its tokens as little-endian 32-bit integers."""
    return hashlib.sha256(parent + token_bytes + key).digest()


def chain_hashes(
    parent: bytes, token_ids: Int32Array, block_size: int, keys: BlockKeys = NO_KEYS, first_block: int = 0
) -> Iterator[bytes]:
    """Yield the hashes of the full blocks that `token_ids` fill after `parent`, one at a time.

    The first of them is number `first_block` of its context.
    """
    token_bytes = token_ids.astype("<i4", copy=False).tobytes()
    num_bytes = 4 * block_size
    for block, end in enumerate(range(num_bytes, len(token_bytes) + 1, num_bytes), start=first_block):
        parent = block_hash(parent, token_bytes[end - num_bytes : end], keys.get(block, b"") if keys else b"")
        yield parent
