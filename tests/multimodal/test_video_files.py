"""Frames of video files: those that transformers would sample, at their times; hostile files are refused."""

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import VIDEO_PLACE, picture

from octavo import SamplingParams
from octavo.errors import InvalidParameterError
from octavo.multimodal.image_processors import NativeSizeProcessor
from octavo.multimodal.media import FrameSampling
from octavo.multimodal.pictures import PictureLimits
from octavo.multimodal.video_files import read_video_file

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LIMITS = PictureLimits(max_bytes=500_000, max_pixels=100_000)
NUM_FRAMES = 12


def shade(index: int) -> Image.Image:
    """Return a frame that tells its number: of one gray, in two halves so that rotation shows."""
    pixels = np.full((24, 32, 3), index * 20, dtype=np.uint8)
    pixels[12:] = 255
    return Image.fromarray(pixels)


def animation(kind: str) -> bytes:
    buffer = BytesIO()
    first, *others = (shade(index) for index in range(NUM_FRAMES))
    first.save(buffer, kind, save_all=True, append_images=others, duration=100, lossless=True, loop=0)
    return buffer.getvalue()


def film(container: str, codec: str = "mpeg4") -> bytes:
    av = pytest.importorskip("av")
    buffer = BytesIO()
    with av.open(buffer, "w", format=container) as opened:
        stream = opened.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for index in range(NUM_FRAMES):
            opened.mux(stream.encode(av.VideoFrame.from_image(shade(index))))
        opened.mux(stream.encode())
    return buffer.getvalue()


def as_it_is(image: Image.Image, num_frames: int) -> Any:
    return np.asarray(image)


FILES = [lambda kind=kind: animation(kind) for kind in ("GIF", "WEBP", "PNG")]
FILES += [lambda container=container: film(container) for container in ("mp4", "mov", "avi", "matroska")]


@pytest.mark.parametrize("make", FILES)
def test_wanted_frames_of_a_file(make: Any) -> None:
    asked: list[tuple[int, float]] = []

    def choose(total: int, rate: float) -> list[int]:
        asked.append((total, rate))
        return [0, 3, 3, 11]

    found = read_video_file(make(), "video", LIMITS, choose, as_it_is)
    [(total, rate)] = asked
    assert total == NUM_FRAMES
    assert rate == pytest.approx(10.0)
    shades = [int(each[4, 4, 0]) for each in found.frames]
    assert shades == pytest.approx([0, 60, 60, 220], abs=6)
    assert found.times_s == pytest.approx([0.0, 0.3, 0.3, 1.1])
    assert found.fps == pytest.approx(4 / 12 * 10)


# By the definitions of the families' processors, which need torchvision to be imported: of `total` frames at 25 a
# second. Qwen2-VL: an even number, the first frame of each equal part. Qwen3-VL: from the first to the last.
@pytest.mark.parametrize(
    ("total", "asked", "qwen2", "qwen3"),
    [
        (40, {}, [0, 10, 20, 30], [0, 13, 26, 39]),  # 3.2 frames are fewer than the least, 4
        (3, {}, [0, 1], [0, 1, 2]),
        (75, {}, [0, 12, 25, 37, 50, 62], [0, 15, 30, 44, 59, 74]),
        (40, {"num_frames": 5}, [0, 10, 20, 30], [0, 10, 20, 29, 39]),
        (9, {"fps": 25}, [0, 1, 2, 3, 4, 5, 6, 7], list(range(9))),
        (1, {}, [0], [0]),
    ],
)
def test_sampled_frames(total: int, asked: dict[str, Any], qwen2: list[int], qwen3: list[int]) -> None:
    for expected, reaches_last in ((qwen2, False), (qwen3, True)):
        settings: dict[str, Any] = {"fps": 2.0, "num_frames": None, "min_frames": 4, "max_frames": 768}
        sampling = FrameSampling(**settings, multiple=2 - reaches_last, reaches_last=reaches_last)
        found = sampling.indices(total, 25.0, "video", asked.get("fps"), asked.get("num_frames"))
        assert found == expected


def test_the_limits_of_qwen3_are_those_of_the_whole_video(open_llm: OpenLLM) -> None:
    """In squares of 8 pixels, 64 to 2560 of all frames together, whose number counts as even."""
    reader = open_llm("qwen3-vl").engine.front.inputs.multimodal._reader
    frames: Any = reader.frames
    assert frames.target_size(32, 16, 4) == frames.target_size(32, 16, 1) == (32, 16)
    assert frames.target_size(32, 16, 5) == (32, 16)  # 4 x 512 pixels
    assert frames.target_size(32, 16, 40) == (8, 8)  # sides by the root of 20,480 / 2,560: at least a square
    assert frames.target_size(64, 32, 2) == (48, 24)  # sides by the root of 4,096 / 2,560
    assert frames.target_size(4, 20, 2) == (8, 40)  # no side is shorter than a square


def test_a_file_is_its_frames(open_llm: OpenLLM) -> None:
    """Of 12 frames at 10 a second, a model that wants 2 a second sees 4, the least."""
    for name, wanted in (("qwen2-vl", [0, 3, 6, 9]), ("qwen3-vl", [0, 4, 7, 11])):
        llm = open_llm(name)
        frames = [shade(index) for index in wanted]
        part = {"type": "video", "video": frames, "fps": 10 * 4 / 12}
        file = {"type": "video", "video": animation("PNG")}
        url = {"url": "data:image/png;base64," + b64encode(animation("PNG")).decode(), "num_frames": 2}
        fewer = llm.chat([{"role": "user", "content": [{"type": "video_url", "video_url": url}]}], GREEDY)[0]
        by_url = {
            "type": "video_url",
            "video_url": {"url": "data:image/png;base64," + b64encode(animation("PNG")).decode()},
        }
        answers = [llm.chat([{"role": "user", "content": [each]}], GREEDY)[0] for each in (part, file, by_url)]
        if name == "qwen3-vl":  # the times of files are those of their frames
            text = llm.get_tokenizer().decode(answers[1].prompt_token_ids, skip_special_tokens=False)
            assert [f"<{time} seconds>" in text for time in ("0.2", "0.9")] == [True, True]
            answers = answers[1:]
        assert len({tuple(answer.prompt_token_ids) for answer in answers}) == 1
        assert len(fewer.prompt_token_ids) < len(answers[0].prompt_token_ids)
        assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1


def long_animation() -> bytes:
    """Return a GIF of very many frames of one pixel."""
    head = b"GIF89a" + bytes([1, 0, 1, 0, 0x80, 0, 0]) + bytes(6)
    return head + (b"," + bytes([0, 0, 0, 0, 1, 0, 1, 0, 0]) + b"\x02\x02D\x01\x00") * 20_001 + b";"


@pytest.mark.parametrize(
    ("source", "options", "names"),
    [
        (b"no video at all", {}, "a video is expected: MP4"),
        (b"#EXTM3U\nfile:///etc/passwd", {}, "a video is expected: MP4"),
        (animation("PNG")[:-300], {}, "damaged"),
        (b"\x00\x00\x00\x18ftypisom" + bytes(50), {}, "damaged|PyAV"),
        (animation("PNG"), {"num_frames": 14}, "num_frames=14: 1 to 12"),
        (animation("PNG"), {"num_frames": 0}, "num_frames=0: an integer"),
        (animation("PNG"), {"num_frames": 4, "fps": 1}, "either fps or num_frames"),
        ("http://example.com/a.mp4", {}, "a file, a data: URL"),
        (long_animation, {}, "an animation of 20001 frames': at most 20000"),
    ],
)
def test_what_is_no_video_is_refused(source: Any, options: dict[str, Any], names: str, open_llm: OpenLLM) -> None:
    source = source() if callable(source) else source
    with pytest.raises(InvalidParameterError, match=names):
        open_llm("qwen2-vl").chat(
            [{"role": "user", "content": [{"type": "video", "video": source, **options}]}], GREEDY
        )


def test_sizes_are_checked_before_frames_are_decoded() -> None:
    with pytest.raises(InvalidParameterError, match=r"32 x 24 pixels.*1 to 700"):
        read_video_file(animation("GIF"), "video", PictureLimits(max_pixels=700), lambda *_: [0], as_it_is)
    with pytest.raises(InvalidParameterError, match="at most 100 bytes"):
        read_video_file(animation("GIF"), "video", PictureLimits(max_bytes=100), lambda *_: [0], as_it_is)


def test_frames_are_resized_one_by_one_and_too_many_tokens_refused_at_the_first(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames at their own size, before any is resized, took gigabytes for a file of kilobytes."""
    llm = open_llm("qwen2-vl", encoder_cache_tokens=50)
    seen: list[int] = []
    resized = NativeSizeProcessor.resized

    def counted(self: NativeSizeProcessor, picture: Image.Image, name: str, num_frames: int) -> Any:
        seen.append(num_frames)
        return resized(self, picture, name, num_frames)

    monkeypatch.setattr(NativeSizeProcessor, "resized", counted)
    part = {"type": "video", "video": animation("PNG"), "num_frames": 12}
    with pytest.raises(InvalidParameterError, match=r"content\[0\]='72 tokens': at most 50 .encoder_cache_tokens"):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)
    assert seen == [12]


def test_frame_groups_need_a_place_in_the_prompt(open_llm: OpenLLM) -> None:
    llm = open_llm("qwen3-vl")
    with pytest.raises(InvalidParameterError, match=r"1 videos.*placeholders for 2"):
        llm.generate_multimodal([{"prompt": VIDEO_PLACE * 2, "videos": [[picture(9, 9)]]}], use_tqdm=False)
