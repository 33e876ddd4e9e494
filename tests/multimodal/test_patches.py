"""Patches have the bits of transformers' image processor; hostile pictures are refused with a reason."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.multimodal.tiny import picture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from octavo.config.json_fields import JsonFields
from octavo.config.model import VisionConfig
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from octavo.multimodal.image_processors import (
    ImageProcessor,
    Patches,
    frame_processor,
    image_processor,
    read_image_fields,
    read_video_fields,
)
from octavo.multimodal.pictures import PictureLimits, open_picture

LIMITS = PictureLimits(max_bytes=200_000, max_pixels=1_000_000)
SETTINGS: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 401408}}
TOWER = VisionConfig(
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    out_hidden_size=8,
    in_channels=3,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    activation="quick_gelu",
    rope_theta=1e4,
    image_token_id=1,
    video_token_id=2,
    vision_start_token_id=3,
    vision_end_token_id=4,
)


def processor_in(folder: Path, **settings: Any) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return image_processor(read_image_fields(folder), TOWER)


def normalized(patches: Patches) -> Any:
    """Return the numbers that bytes stand for, [patches, values]."""
    assert patches.levels is not None
    channels = patches.values.reshape(len(patches.values), len(patches.levels), -1)
    found = [levels[channels[:, channel]] for channel, levels in enumerate(patches.levels)]
    return np.stack(found, axis=1).reshape(patches.values.shape)


def in_mode(mode: str) -> Image.Image:
    """Return a picture with what its mode has: transparency, a palette, four inks."""
    if mode == "P":
        image = picture(90, 70).convert("P")
        image.info["transparency"] = 0
        return image
    image = picture(90, 70).convert(mode)
    if "A" in mode:
        image.putalpha(picture(90, 70, 1).convert("L"))
    return image


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (41, 43), (42, 70), (600, 30), (900, 800), (14, 2790)])
def test_patches_of_any_size_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    ours = processor_in(tmp_path).process([picture(*size)], "image")
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(picture(*size), return_tensors="np")
    assert [list(ours.grid)] == theirs["image_grid_thw"].tolist()
    np.testing.assert_array_equal(normalized(ours), theirs["pixel_values"])


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_patches_of_any_mode_are_those_of_transformers(mode: str, tmp_path: Path) -> None:
    ours = processor_in(tmp_path).process([open_picture(in_mode(mode), "image", LIMITS)], "image")
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(in_mode(mode), return_tensors="np")
    np.testing.assert_array_equal(normalized(ours), theirs["pixel_values"])


def test_settings_are_read_from_older_keys_and_from_the_file_of_whole_processors(tmp_path: Path) -> None:
    old = processor_in(tmp_path, size=None, min_pixels=3136, max_pixels=401408)
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "was.json")
    settings = {
        "image_processor": SETTINGS,
        "video_processor": {**SETTINGS, "size": {"shortest_edge": 9, "longest_edge": 99}},
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    new = image_processor(read_image_fields(tmp_path), TOWER)
    assert np.array_equal(new.levels, old.levels)
    assert replace(new, levels=old.levels) == old
    for older in ("preprocessor_config.json", "video_preprocessor_config.json"):  # what transformers reads last
        (tmp_path / older).write_text(json.dumps({**SETTINGS, "size": {"shortest_edge": 1, "longest_edge": 1}}))
    new = image_processor(read_image_fields(tmp_path), TOWER)
    assert np.array_equal(new.levels, old.levels)
    assert replace(new, levels=old.levels) == old
    assert read_video_fields(tmp_path).nested("size").integer("longest_edge") == 99
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    without_size = JsonFields("video", {key: value for key, value in SETTINGS.items() if key != "size"})
    frames: Any = frame_processor(without_size, TOWER)
    assert (frames.min_pixels, frames.max_pixels) == (128 * 28**2, 768 * 28**2)
    assert read_video_fields(tmp_path).nested("size").integer("longest_edge") == 1


@pytest.mark.parametrize(
    ("settings", "names"),
    [({"do_resize": False}, "do_resize"), ({"patch_size": 16}, "patch_size"), ({"image_mean": [0.5]}, "channels")],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], names: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=names):
        processor_in(tmp_path, **settings)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        image_processor(read_image_fields(tmp_path), TOWER)


def test_the_ratio_of_sides_is_limited(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="200 times"):
        processor_in(tmp_path).process([picture(1, 201)], "image")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated_photograph() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    return encoded(picture(20, 10), "PNG", exif=exif)


def test_what_a_file_says_of_its_pixels_is_followed() -> None:
    turned = open_picture(rotated_photograph(), "image", LIMITS)
    assert turned.size == (10, 20)
    assert turned.tobytes() == picture(20, 10).transpose(Image.Transpose.ROTATE_270).tobytes()
    deep = Image.fromarray(np.array([[0, 257, 65535]], dtype=np.uint16))
    assert np.asarray(open_picture(encoded(deep, "PNG"), "image", LIMITS))[0, :, 0].tolist() == [0, 1, 255]


def animation() -> bytes:
    return encoded(picture(8, 8), "GIF", save_all=True, append_images=[picture(8, 8, 1)])


def bomb() -> bytes:
    return encoded(Image.new("1", (20_000, 20_000)), "PNG")


def scans() -> bytes:
    """Return a progressive JPEG that repeats its last scan a hundred times."""
    whole = encoded(picture(16, 16), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * 100 + whole[-2:]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (b"", "not a picture"),
        (b"<svg></svg>", "not a picture"),
        (lambda: encoded(picture(50, 50), "PNG")[:-300], "damaged"),
        (lambda: encoded(picture(50, 50), "JPEG")[:300], "damaged"),
        (animation, "GIF with several frames"),
        (lambda: encoded(picture(8, 8), "TIFF", save_all=True, append_images=[picture(8, 8, 1)]), "TIFF with several"),
        (scans, "JPEG of 1[0-9]+ scans.*at most 100 scans"),
        (bomb, "pixels"),
        (lambda: encoded(picture(1200, 900), "JPEG", quality=1), "1200 x 900 pixels"),
        (bytes(200_001), "200001 bytes"),
        (Image.new("F", (5, 5)), "floating-point"),
        (Image.new("La", (5, 5)), "mode La.: cannot be read"),
        (lambda: Image.open(BytesIO(encoded(picture(50, 50), "PNG")[:-300])), "mode RGB.: cannot be read: .*truncated"),
        (np.zeros((4, 4), dtype=np.uint8), "height, width"),
        ("http://example.com/a.png", "a file, a data: URL"),
        ("/no/such/file.png", "cannot be read"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64,QUI-", "not valid base64"),  # base64url is another code
        ("data:image/png;base64", "a data URL is expected"),
        ("data:image/png,abc", "not a picture"),
        (7, "int"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_hostile_pictures_are_refused_by_name(source: object, names: str) -> None:
    """Functions make theirs here: collecting tests should cost nothing."""
    source = source() if callable(source) else source
    with pytest.raises(InvalidParameterError, match=names) as caught:
        open_picture(source, "images[3]", LIMITS)
    assert caught.value.field == "images[3]"
