"""Messages between an executor and its ranks, in both directions. msgpack; numpy columns are sent as raw bytes.

The first byte of a message is its type, so a step needs one decoder and no tagged unions.
"""

from typing import Any

import msgspec
import numpy as np

from octavo.contracts.frames import as_it_is, plain
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput


class RankCall(msgspec.Struct, frozen=True, kw_only=True):
    """Call a method of the worker; every rank replies with a `RankResult` or a `RankFailure`, at once or later."""

    call_id: int
    method: str
    arguments: list[Any] = []


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The return value of a method."""

    call_id: int
    value: Any


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A method or a step raised. The rank keeps running; the executor decides what to do with it."""

    error_type: str
    message: str
    traceback: str
    step: int | None = None  # None: a method raised
    call_id: int = -1


ToRank = SchedulerOutput | RankCall
FromRank = ModelRunnerOutput | RankResult | RankFailure


def encode_rank_message(message: ToRank | FromRank) -> bytearray:
    """Encode a message to or from a rank. Replies come without request ids, which the executor knows."""
    buffer = bytearray(_KINDS[type(message)])
    _encoder.encode_into(message, buffer, 1)
    return buffer


def decode_rank_message(message: bytes | bytearray) -> Any:
    """Decode a message to a rank (`ToRank`) or from one (`FromRank`); arrays are writable and own their memory."""
    return _DECODE[message[0]](memoryview(message)[1:])


# A column is an extension type whose code is the dtype number; a 2-D table adds _TABLE and starts with its width.
_DTYPES: dict[int, np.dtype[Any]] = {
    np.dtype(kind).num: np.dtype(kind) for kind in (np.int32, np.bool_, np.float32, np.uint8)
}
_TABLE = 64
_WIDTH_BYTES = 4


def _from_array(array: object) -> object:
    if not isinstance(array, np.ndarray):
        return plain(array)
    assert array.dtype.num in _DTYPES, f"columns of {array.dtype} cannot be sent to a rank"
    if array.ndim == 1:
        return msgspec.msgpack.Ext(array.dtype.num, array.tobytes())
    _, width = array.shape
    return msgspec.msgpack.Ext(_TABLE + array.dtype.num, width.to_bytes(_WIDTH_BYTES, "little") + array.tobytes())


def _to_array(code: int, data: memoryview) -> "np.ndarray[Any, Any]":
    if code < _TABLE:
        return np.frombuffer(bytearray(data), _DTYPES[code])
    width = int.from_bytes(data[:_WIDTH_BYTES], "little")
    return np.frombuffer(bytearray(data[_WIDTH_BYTES:]), _DTYPES[code - _TABLE]).reshape(-1, width)


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_KINDS: dict[type, bytes] = {
    SchedulerOutput: b"s", RankCall: b"c", ModelRunnerOutput: b"a", RankResult: b"r", RankFailure: b"f"
}  # fmt: skip
_DECODE: dict[int, Any] = {
    kind[0]: msgspec.msgpack.Decoder(cls, ext_hook=_to_array, dec_hook=as_it_is).decode for cls, kind in _KINDS.items()
}
