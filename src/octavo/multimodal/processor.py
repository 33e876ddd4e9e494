"""`MultiModalProcessor`: requests with images to prompts, by our own tokenizer, template and image processor."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config.model import VisionConfig
from octavo.errors import InvalidParameterError
from octavo.multimodal.media import MediaReader, Source, Video, take_images
from octavo.multimodal.placeholders import Medium, MultiModalPrompt, expand_vision_placeholders, write_placeholders
from octavo.tokenizer.tokenizer import ContextLimit

_PROMPT_KEYS = {"prompt", "images", "videos"}


class MultiModalProcessor:
    """Of one model. Its settings are read when the first image comes; callable from any thread."""

    def __init__(self, path: str, vision: VisionConfig, limit: ContextLimit, max_image_tokens: int) -> None:
        self._path, self._vision, self._limit, self._tokenizer = Path(path), vision, limit, limit.tokenizer
        self._max_image_tokens = max_image_tokens  # what the encoder cache holds

    def of_request(self, request: object, processor: Any = None, **template_options: object) -> MultiModalPrompt:
        """Return the prompt of `{"messages": [...]}`, or of `{"prompt": text, "images": [...], "videos": [...]}`.

        `processor` is the caller's own, with the interface of transformers' processors; for images only.

        Raises InvalidParameterError: a malformed request, or images that cannot be read or do not match the prompt.
        PromptTooLongError: a text that is much longer than the model's context.
        """
        keys = set(request) if isinstance(request, Mapping) else set()
        is_known = keys == {"messages"} or ("prompt" in keys and keys <= _PROMPT_KEYS)
        if not isinstance(request, Mapping) or not is_known:
            limit = '{"messages": [...]} or {"prompt": text, "images": [...], "videos": [...]} is expected'
            found = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
            raise InvalidParameterError("requests", found, limit)
        if "messages" in request:
            messages, sources = take_images(request["messages"])
            if processor is not None:
                text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                return self._by_callers(processor, text, sources)
            return self._of_text(self._tokenizer.render_chat(messages, **template_options), sources, is_rendered=True)
        text = request["prompt"]
        if not isinstance(text, str):
            raise InvalidParameterError("prompt", text, "a string is expected")
        sources = [*_listed(request, "images"), *_listed(request, "videos")]
        if processor is not None:
            return self._by_callers(processor, text, sources)
        return self._of_text(text, sources, is_rendered=False)

    def read_images(self, sources: Sequence[Source]) -> list[Medium]:
        """Return images as the tower reads them. Raises InvalidParameterError: one cannot be read, or is a video."""
        for source in sources:
            if source.is_video:
                raise InvalidParameterError(source.name, "a video", "only images are taken here")
        return [self._reader.image(source) for source in sources]

    @property
    def image_text(self) -> str:
        """What stands for an image in the text of a prompt."""
        vision, text_of = self._vision, self._tokenizer.token_text
        ids = vision.vision_start_token_id, vision.image_token_id, vision.vision_end_token_id
        start, image, end = ("" if token_id is None else text_of(token_id) for token_id in ids)
        around = vision.text_around or ""
        return f"{around}{start}{image}{end}{around}"

    def written(self, text: str) -> str:
        """Return a text that a chat template has rendered with all that stands for its images."""
        return write_placeholders(text, (), self._vision, self._tokenizer.token_text)

    def with_images(self, token_ids: Sequence[int], images: Sequence[Medium]) -> MultiModalPrompt:
        """Return a prompt whose images have a placeholder each, in order. Raises InvalidParameterError: they do not."""
        return self._of_media(None, token_ids, [(False, image) for image in images])

    def _of_text(self, text: str, sources: Sequence[Source], *, is_rendered: bool) -> MultiModalPrompt:
        self._limit.check_text(text)  # placeholders only get longer
        media: list[tuple[bool, Medium]] = []
        videos: list[Video] = []
        for source in sources:
            if source.is_video:
                videos.append(self._reader.video(source))
                media += [(True, part) for part in videos[-1].parts]
            else:
                media.append((False, self._reader.image(source)))
        times_s = [video.times_s for video in videos]
        written = write_placeholders(text, times_s, self._vision, self._tokenizer.token_text)
        token_ids = self._tokenizer.encode(written, add_special_tokens=not is_rendered)
        return self._of_media(text, token_ids, media)

    def _by_callers(self, processor: Any, text: str, sources: Sequence[Source]) -> MultiModalPrompt:
        """Let a processor of transformers' kind tokenize the text and cut the images."""
        for source in sources:
            if source.is_video:
                raise InvalidParameterError(source.name, "a video", "a caller's own processor is for images only")
        pictures = [self._reader.picture(source) for source in sources]
        made = processor(text=[text], images=pictures or None, return_tensors="np")
        [token_ids] = np.asarray(made["input_ids"]).tolist()
        return self._of_media(text, token_ids, [(False, image) for image in self._reader.images.patches_of(made)])

    def _of_media(
        self, text: str | None, token_ids: Sequence[int], media: Sequence[tuple[bool, Medium]]
    ) -> MultiModalPrompt:
        """Expand placeholders; `media` are (is it a video, what it is), those of each kind in order."""
        by_kind = {kind: [medium for is_video, medium in media if is_video is kind] for kind in (False, True)}
        images, videos = ([medium.grid for medium in each] or None for each in by_kind.values())
        expanded = expand_vision_placeholders(token_ids, images, self._vision, videos)
        num_seen, in_order = {False: 0, True: 0}, []
        for place in expanded.ranges:
            number = num_seen[place.is_video]
            if place.num_tokens > self._max_image_tokens:
                limit = f"at most {self._max_image_tokens} (encoder_cache_tokens)"
                name = f"{'videos' if place.is_video else 'images'}[{number}]"
                raise InvalidParameterError(name, f"{place.num_tokens} tokens", limit)
            in_order.append(by_kind[place.is_video][number])
            num_seen[place.is_video] += 1
        return MultiModalPrompt.of(text, expanded, in_order, self._vision)

    @cached_property
    def _reader(self) -> MediaReader:
        return MediaReader.of(self._path, self._vision, self._max_image_tokens)


def _listed(request: Mapping[str, object], kind: str) -> list[Source]:
    """Return the images, or the videos, that a request passes next to its prompt."""
    listed = request.get(kind, [])
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise InvalidParameterError(kind, type(listed).__name__, f"a list of {kind} is expected")
    is_video = kind == "videos"
    return [Source(name=f"{kind}[{at}]", content=content, is_video=is_video) for at, content in enumerate(listed)]
