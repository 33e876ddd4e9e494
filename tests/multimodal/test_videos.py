"""Frames of videos, and embeddings made elsewhere: the greedy tokens of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import IMAGE, PATCH, PLACE, VIDEO, VIDEO_PLACE, picture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from octavo import SamplingParams
from octavo.errors import InvalidParameterError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FRAMES = [picture(17, 26, seed) for seed in range(5)]
FPS = 1.0


def video_values(folder: Any, frames: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches of pairs of frames, and the grid: each frame as transformers cuts an image."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    made = [processor([frame], return_tensors="pt") for frame in [*frames, frames[-1]][: len(frames) // 2 * 2 + 2]]
    cut = [one["pixel_values"].view(-1, 3, 2, PATCH, PATCH)[:, :, 0] for one in made]
    pairs = [torch.stack(pair, dim=2).flatten(1) for pair in zip(cut[::2], cut[1::2], strict=True)]
    [[_, rows, columns]] = made[0]["image_grid_thw"].tolist()
    return torch.cat(pairs), torch.tensor([[len(pairs), rows, columns]])


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_greedy_tokens_of_a_video_are_those_of_transformers(
    name: str, seeing: GetCheckpoint, open_llm: OpenLLM
) -> None:
    checkpoint, llm = seeing(name), open_llm(name)
    image = picture(12, 30, 9)
    content = [
        {"type": "video", "video": FRAMES, "fps": FPS},
        {"type": "text", "text": "then"},
        {"type": "image", "image": image},
    ]
    [output] = llm.chat([{"role": "user", "content": content}], GREEDY)
    ids = torch.tensor([output.prompt_token_ids])
    values, grid = video_values(checkpoint.folder, FRAMES)
    still = Qwen2VLImageProcessorPil.from_pretrained(checkpoint.folder)([image], return_tensors="pt")
    timing = {"second_per_grid_ts": [2 / FPS]} if name == "qwen2.5-vl" else {}
    made = checkpoint.reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values_videos=values,
        video_grid_thw=grid,
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        max_new_tokens=8,
        do_sample=False,
        **still,
        **timing,
    )
    assert output.outputs[0].token_ids == made[0, ids.shape[1] :].tolist()


def test_frames_may_be_an_array(open_llm: OpenLLM) -> None:
    llm = open_llm("qwen2-vl")
    ways: list[Any] = [FRAMES, np.stack([np.asarray(frame) for frame in FRAMES])]
    requests = [{"prompt": f"{VIDEO_PLACE}?", "videos": [frames]} for frames in ways]
    listed, stacked = llm.generate_multimodal(requests, GREEDY, use_tqdm=False)
    assert listed.prompt_token_ids == stacked.prompt_token_ids
    assert listed.outputs[0].token_ids == stacked.outputs[0].token_ids


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_precomputed_embeddings_take_the_place_of_an_image(name: str, seeing: GetCheckpoint, open_llm: OpenLLM) -> None:
    checkpoint, image = seeing(name), picture(30, 21, 1)
    seen = Qwen2VLImageProcessorPil.from_pretrained(checkpoint.folder)([image], return_tensors="pt")
    with torch.inference_mode():
        made = checkpoint.reference.model.visual(seen["pixel_values"], seen["image_grid_thw"])
    given = {"image_embeds": made.pooler_output.numpy(), "image_grid_thw": seen["image_grid_thw"][0].tolist()}
    llm = open_llm(name)
    prompts = [{"prompt": f"See {PLACE}{PLACE}.", "images": images} for images in ([image, given], [given, image])]
    outputs = llm.generate_multimodal(prompts, GREEDY, use_tqdm=False)
    if name == "qwen2-vl":  # embeddings say all that its tower does
        [whole] = llm.generate_multimodal([{**prompts[0], "images": [image, image]}], GREEDY, use_tqdm=False)
        assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(whole.outputs[0].token_ids)}


@pytest.mark.parametrize(
    ("name", "part", "names"),
    [
        ("qwen2-vl", {"type": "video", "video": []}, "0 frames"),
        ("qwen2-vl", {"type": "video", "video": 5}, "a list of 1 to 768 frames"),
        ("qwen2-vl", {"type": "video", "video": "a.mp4"}, "cannot be read"),
        ("qwen2-vl", {"type": "video", "video": FRAMES, "num_frames": 2}, "num_frames=2: .*files only"),
        ("qwen2-vl", {"type": "video", "video": [picture(8, 8), picture(9, 8)]}, r"frames\[1\].*size of the first"),
        ("qwen2-vl", {"type": "video", "video": FRAMES, "fps": 0}, "fps=0"),
        ("qwen2.5-vl", {"type": "video", "video": FRAMES, "fps": 0.01}, "frames of a video are so far apart"),
        ("llava", {"type": "video", "video": FRAMES}, "images only"),
        ("qwen2-vl", {"type": "image", "image": {"image_embeds": []}}, "image_grid_thw"),
        (
            "qwen2-vl",
            {"type": "image", "image": {"image_embeds": np.zeros((2, 36)), "image_grid_thw": [1, 2, 2]}},
            r"float64 \[2, 36\].*\[1, 36\]",
        ),
        (
            "qwen2-vl",
            {"type": "image", "image": {"image_embeds": [[1.0], []], "image_grid_thw": [1, 2, 2]}},
            "finite floats",
        ),
        (
            "qwen2-vl",
            {"type": "image", "image": {"image_embeds": np.full((1, 36), np.nan), "image_grid_thw": [1, 2, 2]}},
            "finite",
        ),
    ],
)
def test_what_is_no_video_or_embedding_is_refused(
    name: str, part: dict[str, Any], names: str, open_llm: OpenLLM
) -> None:
    llm = open_llm(name)
    with pytest.raises(InvalidParameterError, match=names):
        llm.chat([{"role": "user", "content": [part]}], GREEDY)
