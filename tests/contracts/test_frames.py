"""Arrays travel in frames of their own, each once, and arrive as they were."""

import enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.contracts.frames import FrameDecoder, encode_frames, plain


class Message(msgspec.Struct):
    name: str
    tables: list[NDArray[Any]]


def test_tables_arrive_beside_the_message() -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 5), dtype=np.uint8)
    frames = encode_frames(Message("a", [first, second, first]))
    assert [len(frame) for frame in frames[1:]] == [24, 5]
    decoded = FrameDecoder(Message).decode([bytes(frame) for frame in frames])
    for sent, arrived in zip([first, second, first], decoded.tables, strict=True):
        np.testing.assert_array_equal(arrived, sent)
        assert arrived.flags.writeable


def test_numbers_and_texts_of_subclasses_arrive_as_what_they_are() -> None:
    class Name(enum.StrEnum):
        FIRST = "a"

    class Level(enum.IntEnum):
        HIGH = 3

    sent = {"name": Name.FIRST, "level": Level.HIGH, "weight": np.float64(0.5)}
    expected = {"name": "a", "level": 3, "weight": 0.5}
    assert msgspec.msgpack.decode(encode_frames(sent)[0]) == expected
    assert msgspec.json.decode(msgspec.json.encode(sent, enc_hook=plain)) == expected


def test_a_message_without_tables_is_one_frame() -> None:
    frames = encode_frames(Message("a", []))
    assert len(frames) == 1
    assert FrameDecoder(Message).decode([bytes(frames[0])]) == Message("a", [])
