"""Which `ImageProcessor` a checkpoint needs, and where its settings are."""

from dataclasses import replace
from pathlib import Path

from octavo.config.json_fields import JsonFields
from octavo.config.vision import VisionConfig
from octavo.multimodal.fixed_size import FixedSizeProcessor
from octavo.multimodal.native_size import NativeSizeProcessor
from octavo.multimodal.patches import ImageProcessor


def read_image_processor(folder: Path, vision: VisionConfig) -> ImageProcessor:
    """Read the settings for images of the checkpoint in `folder`.

    Raises:
        CheckpointError: there are none, or they are malformed.
        UnsupportedModelError: they do not fit the tower, or are not supported.
    """
    return _of(_fields_in(folder), vision)


def read_video_fields(folder: Path) -> JsonFields:
    """Return the settings for videos of the checkpoint in `folder`; without any, those of images apply.

    Raises:
        CheckpointError: there are none, or they are malformed.
    """
    own = folder / "video_preprocessor_config.json"
    return JsonFields.read(own) if own.exists() else _fields_in(folder)


def frame_processor(fields: JsonFields, vision: VisionConfig) -> ImageProcessor:
    """Return the processor of the frames of videos. Raises as `read_image_processor`."""
    processor = _of(fields, vision)
    if vision.has_frame_times and isinstance(processor, NativeSizeProcessor):
        return replace(processor, limits_whole_video=True)
    return processor


def _of(fields: JsonFields, vision: VisionConfig) -> ImageProcessor:
    return (NativeSizeProcessor if vision.image_size is None else FixedSizeProcessor).of(fields, vision)


def _fields_in(folder: Path) -> JsonFields:
    """Return the settings from either of the files that have them."""
    own, combined = folder / "preprocessor_config.json", folder / "processor_config.json"
    if not own.exists() and combined.exists():
        return JsonFields.read(combined).nested("image_processor")
    return JsonFields.read(own)
