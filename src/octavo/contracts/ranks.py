"""What crosses the line between an executor and its ranks, in both directions. msgpack; columns travel as raw bytes.

The first byte of a message says what follows, so that a step costs one decoder and no tagging of its parts.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput

RankMethod = Literal["init_worker", "load_model", "count_kv_blocks", "initialize_kv_cache", "warmup", "prefault_kv"]


class RankCall(msgspec.Struct, frozen=True, kw_only=True):
    """Run a method of the worker; every rank replies with a `RankResult` or a `RankFailure`."""

    method: RankMethod
    arguments: list[list[int]] = []


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the method returned."""

    value: bool | int | str | list[int] | None


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A method, or a step, raised. The rank goes on; what becomes of it the executor decides."""

    error_type: str
    message: str
    traceback: str
    step: int | None = None  # None: it was a method


ToRank = SchedulerOutput | RankCall
FromRank = ModelRunnerOutput | RankResult | RankFailure


def encode_to_rank(message: ToRank) -> bytearray:
    """Return the bytes of an order or a call."""
    return _encode(b"s" if isinstance(message, SchedulerOutput) else b"c", message)


def decode_to_rank(message: bytes | bytearray) -> ToRank:
    """Return the order or the call in `message`; arrays are writable and own their memory."""
    body = memoryview(message)[1:]
    decoded: ToRank = _decode_order(body) if message[0] == ord("s") else _decode_call(body)
    return decoded


def encode_from_rank(message: FromRank) -> bytearray:
    """Return the bytes of a reply. The ids of an answer stay behind: whoever gave the order knows them."""
    return _encode(_KINDS[type(message)], message)


def decode_from_rank(message: bytes) -> FromRank:
    """Return the reply in `message`."""
    decoded: FromRank = _REPLIES[message[0]](memoryview(message)[1:])
    return decoded


def _encode(kind: bytes, message: object) -> bytearray:
    buffer = bytearray(kind)
    _encoder.encode_into(message, buffer, 1)
    return buffer


# A column is an extension type whose number says dtype and number of dimensions; a table starts with its width.
_DTYPES: dict[int, np.dtype[Any]] = {np.dtype(kind).num: np.dtype(kind) for kind in (np.int32, np.bool_)}
_TABLE = 64
_WIDTH_BYTES = 4


def _from_array(array: Any) -> msgspec.msgpack.Ext:
    assert isinstance(array, np.ndarray), f"{type(array)} does not cross to a rank"
    assert array.dtype.num in _DTYPES, f"columns of {array.dtype} do not cross to a rank"
    if array.ndim == 1:
        return msgspec.msgpack.Ext(array.dtype.num, array.tobytes())
    _, width = array.shape
    return msgspec.msgpack.Ext(_TABLE + array.dtype.num, width.to_bytes(_WIDTH_BYTES, "little") + array.tobytes())


def _to_array(code: int, data: memoryview) -> "np.ndarray[Any, Any]":
    if code < _TABLE:
        return np.frombuffer(bytearray(data), _DTYPES[code])
    width = int.from_bytes(data[:_WIDTH_BYTES], "little")
    return np.frombuffer(bytearray(data[_WIDTH_BYTES:]), _DTYPES[code - _TABLE]).reshape(-1, width)


def _as_it_is(expected: type, value: Any) -> Any:
    """Arrays are complete when they come here."""
    assert isinstance(value, np.ndarray), f"{type(value)} is no column, where {expected} belongs"
    return value


def _decoder(cls: Any) -> Any:
    return msgspec.msgpack.Decoder(cls, ext_hook=_to_array, dec_hook=_as_it_is).decode


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_array)
_decode_order = _decoder(SchedulerOutput)
_decode_call = _decoder(RankCall)
_KINDS: dict[type, bytes] = {ModelRunnerOutput: b"a", RankResult: b"r", RankFailure: b"f"}
_REPLIES: dict[int, Any] = {kind[0]: _decoder(cls) for cls, kind in _KINDS.items()}
