"""Hashes of full KV blocks, by content: equal prefixes get equal hashes, in every process and on every machine.

A block's KV depends on all tokens before it, so its hash is H(hash of the previous block, its own tokens). The chain
starts from a root that also covers whatever else the KV depends on (an adapter) or must not be shared across (a
tenant's salt). A block with tokens of an image also covers the image's hash and where in it the block begins. SHA-256,
because a collision would show one tenant another's text.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from octavo.contracts.engine import EngineCoreRequest, ExtraInputs, VisionInput
from octavo.contracts.schedule import Int32Array

BlockKeys = Mapping[int, bytes]  # by a block's number in its context: what its hash covers besides tokens
NO_KEYS: BlockKeys = MappingProxyType({})

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
    """Return the parent of a request's first block: the same for an adapter under two names or from two folders."""
    if request.adapter is None:
        return _base_root(request)
    return root_hash(("adapter", request.adapter.content_hash, _base_root(request).hex()))


def _base_root(request: EngineCoreRequest) -> bytes:
    salt, extra = request.cache_salt, request.extra_inputs
    if extra is not None and extra.vision:  # in the keys of its blocks
        extra = msgspec.structs.replace(extra, vision=[])
        if not extra.embedding_spans:  # these follow from it and the tokens, and from the grids of what spans there are
            extra = msgspec.structs.replace(extra, rotary_positions=None, whole_spans=[])
    if extra is None or extra == ExtraInputs():
        return root_hash(() if salt is None else (salt,))
    # All of it goes into the first block's parent, wherever in the prompt it applies.
    return root_hash((str(salt is None), salt or "", hashlib.sha256(msgspec.msgpack.encode(extra)).hexdigest()))


def vision_keys(vision: Sequence[VisionInput], block_size: int) -> BlockKeys:
    """Return the keys of the blocks that have tokens of images: of each, its hash and the block's offset in it."""
    keys: dict[int, bytes] = {}
    for image in vision:
        end = image.start + image.num_tokens
        for block in range(image.start // block_size, -(-end // block_size)):
            offset = (block * block_size - image.start).to_bytes(8, "little", signed=True)
            keys[block] = keys.get(block, b"") + bytes.fromhex(image.content_hash) + offset
    return keys


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
