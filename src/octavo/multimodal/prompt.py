"""`MultiModalPrompt`: tokens and images, as the processor made them of a request."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from octavo.config.vision import VisionConfig
from octavo.contracts.engine import ExtraInputs, VisionInput
from octavo.multimodal.patches import Patches
from octavo.multimodal.placeholders import ExpandedPrompt
from octavo.multimodal.positions import rotary_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalPrompt:
    """A prompt for `InputProcessor.process`, complete and checked but for its length."""

    text: str | None
    token_ids: list[int]
    extra_inputs: ExtraInputs

    @classmethod
    def of(cls, text: str | None, prompt: ExpandedPrompt, images: Sequence[Patches], config: VisionConfig) -> Self:
        """Put images in the places of their placeholders."""
        vision = [
            VisionInput(
                start=place.start,
                num_tokens=place.num_tokens,
                grid=image.grid,
                content_hash=content_hash(image),
                patches=image.values,
            )
            for place, image in zip(prompt.ranges, images, strict=True)
        ]
        positions = rotary_positions(len(prompt.token_ids), vision, config)
        extra = ExtraInputs(rotary_positions=positions.tobytes(), vision=vision)
        return cls(text=text, token_ids=prompt.token_ids, extra_inputs=extra)


def content_hash(image: Patches) -> str:
    """Return SHA-256 over grid and patches: of the content, whatever its name or address."""
    digest = hashlib.sha256(np.array(image.grid, dtype="<i8").tobytes())
    digest.update(np.ascontiguousarray(image.values, dtype="<f4").data)
    return digest.hexdigest()
