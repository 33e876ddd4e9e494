"""Hashes of full KV blocks, by content: equal prefixes get equal hashes, in every process and on every machine.

A block's KV depends on all tokens before it, so its hash is H(hash of the previous block, its own tokens). The chain
starts from a root that also covers whatever else the KV depends on (an adapter, an image) or must not be shared
across (a tenant's salt). SHA-256, because a collision would show one tenant another's text.
"""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.schedule import Int32Array

_DOMAIN = b"octavo kv block 1"


def root_hash(extra_keys: Iterable[str] = ()) -> bytes:
    """Return the parent of a first block. `extra_keys` are length-prefixed, so no two lists can collide."""
    digest = hashlib.sha256(_DOMAIN)
    for key in extra_keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def request_root(request: EngineCoreRequest) -> bytes:
    """Return the parent of a request's first block."""
    salt, extra = request.cache_salt, request.extra_inputs
    if extra is None:
        return root_hash(() if salt is None else (salt,))
    # All of it goes into the first block's parent, wherever in the prompt it applies.
    return root_hash((str(salt is None), salt or "", hashlib.sha256(msgspec.msgpack.encode(extra)).hexdigest()))


def block_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """Return the hash of a full block after `parent`; `token_bytes` are its tokens as little-endian 32-bit integers."""
    return hashlib.sha256(parent + token_bytes).digest()


def chain_hashes(parent: bytes, token_ids: Int32Array, block_size: int) -> Iterator[bytes]:
    """Yield the hashes of the full blocks that `token_ids` fill after `parent`, one at a time."""
    token_bytes = token_ids.astype("<i4", copy=False).tobytes()
    num_bytes = 4 * block_size
    for end in range(num_bytes, len(token_bytes) + 1, num_bytes):
        parent = block_hash(parent, token_bytes[end - num_bytes : end])
        yield parent
