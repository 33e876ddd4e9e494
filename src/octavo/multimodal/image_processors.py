"""Which `ImageProcessor` a checkpoint needs, and where its settings are."""

from dataclasses import replace
from pathlib import Path

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.multimodal.fixed_size import FixedSizeProcessor
from octavo.multimodal.native_size import NativeSizeProcessor
from octavo.multimodal.patches import ImageProcessor

_FRAME_TOKENS = (128, 768)  # of squares of so many pixels a side, whatever the checkpoint's are:
_UNIT, _UNIT_WITH_TIMES = 28, 32


def read_image_processor(folder: Path, vision: VisionConfig) -> ImageProcessor:
    """Read the settings for images of the checkpoint in `folder`.

    Raises:
        CheckpointError: there are none, or they are malformed.
        UnsupportedModelError: they do not fit the tower, or are not supported.
    """
    return _of(_image_fields(folder), vision)


def read_video_fields(folder: Path) -> JsonFields:
    """Return the settings for videos of the checkpoint in `folder`; without any, those of images apply.

    Raises:
        CheckpointError: there are none, or they are malformed.
    """
    combined, own = _combined(folder), folder / "video_preprocessor_config.json"
    if "video_processor" in combined:
        return combined.nested("video_processor")
    return JsonFields.read(own) if own.exists() else _image_fields(folder)


def frame_processor(fields: JsonFields, vision: VisionConfig) -> ImageProcessor:
    """Return the processor of the frames of videos. Raises as `read_image_processor`."""
    if "size" not in fields and vision.image_size is None:  # the default of images is another
        unit = _UNIT_WITH_TIMES if vision.has_frame_times else _UNIT
        least, most = (tokens * unit**2 for tokens in _FRAME_TOKENS)
        fields = JsonFields(fields.origin, {**fields.values, "size": {"shortest_edge": least, "longest_edge": most}})
    processor = _of(fields, vision)
    if vision.has_frame_times and isinstance(processor, NativeSizeProcessor):
        return replace(processor, limits_whole_video=True)
    return processor


def _of(fields: JsonFields, vision: VisionConfig) -> ImageProcessor:
    return (NativeSizeProcessor if vision.image_size is None else FixedSizeProcessor).of(fields, vision)


def _image_fields(folder: Path) -> JsonFields:
    combined = _combined(folder)
    if "image_processor" in combined:
        return combined.nested("image_processor")
    return JsonFields.read(folder / "preprocessor_config.json")


def _combined(folder: Path) -> JsonFields:
    """Return `processor_config.json`, empty if there is none. Since version 5, transformers saves all settings there.

    Where a checkpoint has older files, too, those of the newer one count. Written by version 4, it has none.
    """
    path = folder / "processor_config.json"
    return JsonFields.read(path) if path.exists() else JsonFields(str(path), {})
