"""`MultiModalProcessor`: requests with images to prompts, by our own tokenizer, template and image processor."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config.vision import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.messages import Messages, take_images
from octavo.multimodal.patches import ImageProcessor, Patches
from octavo.multimodal.pictures import PictureLimits, open_picture
from octavo.multimodal.placeholders import checked_grids, expand_vision_placeholders
from octavo.multimodal.prompt import MultiModalPrompt
from octavo.tokenizer.tokenizer import Tokenizer

_REQUEST_KEYS = ({"messages"}, {"prompt"}, {"prompt", "images"})


class MultiModalProcessor:
    """Of one model. Its settings are read when the first image comes; callable from any thread."""

    def __init__(self, path: str, vision: VisionConfig, tokenizer: Tokenizer, max_image_tokens: int) -> None:
        self._path, self._vision, self._tokenizer = Path(path), vision, tokenizer
        self._max_image_tokens = max_image_tokens  # what the encoder cache holds
        self._limits = PictureLimits()

    def of_request(self, request: object, processor: Any = None, **template_options: object) -> MultiModalPrompt:
        """Return the prompt of `{"messages": [...]}`, or of `{"prompt": text, "images": [...]}`.

        `processor` is the caller's own, with the interface of transformers' processors.

        Raises:
            InvalidParameterError: a malformed request, or images that cannot be read or do not match the prompt.
        """
        if not isinstance(request, Mapping) or set(request) not in _REQUEST_KEYS:
            limit = '{"messages": [...]} or {"prompt": text, "images": [...]} is expected'
            raise InvalidParameterError("requests", request if isinstance(request, str) else type(request), limit)
        if "messages" in request:
            messages, images = take_images(request["messages"])
            if processor is not None:
                text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                return self._by_callers(processor, text, images)
            return self._of_text(self._tokenizer.render_chat(messages, **template_options), images, is_rendered=True)
        text, sources = request["prompt"], request.get("images", [])
        if not isinstance(text, str):
            raise InvalidParameterError("prompt", text, "a string is expected")
        if not isinstance(sources, Sequence) or isinstance(sources, (str, bytes)):
            raise InvalidParameterError("images", type(sources).__name__, "a list of images is expected")
        images = [(f"images[{index}]", source) for index, source in enumerate(sources)]
        if processor is not None:
            return self._by_callers(processor, text, images)
        return self._of_text(text, images, is_rendered=False)

    def of_chat(self, messages: Messages, **template_options: object) -> MultiModalPrompt:
        """Return the prompt of a conversation; see `of_request`."""
        return self.of_request({"messages": messages}, **template_options)

    def _of_text(self, text: str, images: Sequence[tuple[str, object]], *, is_rendered: bool) -> MultiModalPrompt:
        token_ids = self._tokenizer.encode(text, add_special_tokens=not is_rendered)
        patches = [self._patches(name, source) for name, source in images]
        return self._of_patches(text, token_ids, patches)

    def _patches(self, name: str, source: object) -> Patches:
        return self._images.process([open_picture(source, name, self._limits)], name)

    def _by_callers(self, processor: Any, text: str, images: Sequence[tuple[str, object]]) -> MultiModalPrompt:
        """Let a processor of transformers' kind tokenize the text and cut the images."""
        pictures = [open_picture(source, name, self._limits) for name, source in images]
        made = processor(text=[text], images=pictures or None, return_tensors="np")
        [token_ids] = np.asarray(made["input_ids"]).tolist()
        grids = checked_grids(made.get("image_grid_thw"), self._vision)
        ends = np.cumsum([frames * rows * columns for frames, rows, columns in grids])
        values = np.asarray(made["pixel_values"], dtype=np.float32) if grids else np.zeros((0, 0), dtype=np.float32)
        wanted = (int(ends[-1]), self._vision.patch_values) if grids else (0, 0)
        if values.shape != wanted:
            raise InvalidParameterError("pixel_values", list(values.shape), f"{list(wanted)} by image_grid_thw")
        patches = [Patches(part, grid) for part, grid in zip(np.split(values, ends[:-1]), grids, strict=False)]
        return self._of_patches(text, token_ids, patches)

    def _of_patches(self, text: str, token_ids: Sequence[int], patches: Sequence[Patches]) -> MultiModalPrompt:
        grids = np.array([image.grid for image in patches], dtype=np.int64).reshape(-1, 3)
        expanded = expand_vision_placeholders(token_ids, grids, self._vision)
        for index, place in enumerate(expanded.ranges):
            if place.num_tokens > self._max_image_tokens:
                limit = f"at most {self._max_image_tokens} (encoder_cache_tokens)"
                raise InvalidParameterError(f"images[{index}]", f"{place.num_tokens} tokens", limit)
        return MultiModalPrompt.of(text, expanded, patches, self._vision)

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor.read(self._path, self._vision)
