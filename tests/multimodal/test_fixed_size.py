"""Pictures of one size have the bits of transformers' image processors; settings that do not fit are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.multimodal.test_patches import TOWER, normalized
from tests.multimodal.tiny import picture
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from octavo.config.model import VisionConfig
from octavo.errors import InvalidParameterError, UnsupportedModelError
from octavo.multimodal.image_processors import ImageProcessor, image_processor, read_image_fields

SIDE, PATCH = 28, 7
PLAIN = VisionConfig(
    **{name: getattr(TOWER, name) for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads")},
    out_hidden_size=8,
    in_channels=3,
    activation="quick_gelu",
    image_size=SIDE,
    patch_size=PATCH,
    temporal_patch_size=1,
    spatial_merge_size=1,
    image_token_id=1,
)
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 31}, "crop_size": SIDE}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (CLIPImageProcessorPil, CLIP),
    (
        SiglipImageProcessorPil,
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": SIDE, "width": SIDE}},
    ),
    (Gemma3ImageProcessorPil, {"image_processor_type": "Gemma3ImageProcessorFast", "size": SIDE, "resample": 3}),
]


def processor_in(folder: Path, settings: dict[str, Any]) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return image_processor(read_image_fields(folder), PLAIN)


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (31, 47), (47, 30), (300, 20), (29, 700)])
@pytest.mark.parametrize(("theirs", "settings"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
def test_pixels_are_those_of_transformers(
    theirs: Any, settings: dict[str, Any], size: tuple[int, int], tmp_path: Path
) -> None:
    processor = processor_in(tmp_path, settings)
    ours = processor.process([picture(*size)], "image")
    made = theirs.from_pretrained(tmp_path)(picture(*size), return_tensors="np")
    assert ours.grid == (1, SIDE // PATCH, SIDE // PATCH)
    [given] = processor.patches_of(made)
    np.testing.assert_array_equal(normalized(ours), given.values)
    pixels = made["pixel_values"][0].reshape(3, 4, PATCH, 4, PATCH).transpose(1, 3, 0, 2, 4)
    np.testing.assert_array_equal(given.values, pixels.reshape(16, -1))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type='ViTImageProcessor'.*known: CLIP"),
        ({"do_pad": True}, "do_pad=True"),
        ({"do_normalize": False}, "do_normalize=False"),
        ({"crop_size": 35, "size": 35}, "pictures of 35 pixels, the tower reads 28"),
        ({"size": {"shortest_edge": 20}}, "size=20: smaller than crop_size"),
        ({"crop_size": {"height": 28, "width": 30}}, "not a square"),
        ({"image_mean": [0.5]}, "channels"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any], names: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=names):
        processor_in(tmp_path, {**CLIP, **change})


def test_a_line_is_refused_before_it_becomes_gigabytes(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="200 times"):
        processor_in(tmp_path, CLIP).process([picture(1, 201)], "image")
