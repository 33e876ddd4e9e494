"""Messages whose arrays travel alongside: one frame of msgpack, then the bytes of each array in a frame of its own.

Pixels are a thousand times larger than the rest of a message, and are not copied into it.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

# By code of the extension type in place of an array, which holds its frame and its width, 32 bits each.
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.uint8)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PLACE = struct.Struct("<II")


def plain(value: object) -> int | float | str:
    """Return the value as the built-in type that it is a kind of. An `enc_hook` of msgspec."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    assert isinstance(value, str), f"{type(value)} cannot be sent"
    return str.__str__(value)  # not `str(value)`: the text of an enum's member is its name


def encode_frames(message: object) -> list[bytes | memoryview]:
    """Encode a message; tables [., width] in it get frames of their own, each table once."""
    tables: dict[int, np.ndarray[Any, Any]] = {}

    def place(array: object) -> object:
        if not isinstance(array, np.ndarray):
            return plain(array)
        assert array.dtype in _CODES, f"tables of {array.dtype} cannot be sent"
        tables.setdefault(id(array), array)
        frame, (_, width) = list(tables).index(id(array)), array.shape
        return msgspec.msgpack.Ext(_CODES[array.dtype], _PLACE.pack(frame, width))

    head = msgspec.msgpack.encode(message, enc_hook=place)
    return [head, *(np.ascontiguousarray(table).data.cast("B") for table in tables.values())]


class FrameDecoder:
    """Decodes messages of one type."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=self._table, dec_hook=as_it_is)
        self._frames: Sequence[bytes] = ()
        self._tables: dict[int, np.ndarray[Any, Any]] = {}

    def decode(self, frames: Sequence[bytes]) -> Any:
        """Decode the frames of one message; tables are writable and own their memory."""
        head, *self._frames = frames
        message = self._decoder.decode(head)
        self._frames, self._tables = (), {}
        return message

    def _table(self, code: int, data: memoryview) -> "np.ndarray[Any, Any]":
        frame, width = _PLACE.unpack(data)
        if frame not in self._tables:
            flat = np.frombuffer(bytearray(self._frames[frame]), dtype=_DTYPES[code])
            self._tables[frame] = flat.reshape(-1, width)
        return self._tables[frame]


def as_it_is(expected: type, value: Any) -> Any:
    """Check the type of an array that an `ext_hook` has already decoded. A `dec_hook` of msgspec."""
    assert isinstance(value, np.ndarray), f"got {type(value)} instead of an array ({expected})"
    return value
