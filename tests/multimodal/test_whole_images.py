"""Gemma 3, where an image's tokens see one another: no step ends inside an image, whatever is in its place."""

from typing import Any

import pytest
import torch
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import VISION_MODELS, picture

from octavo import SamplingParams
from octavo.errors import InvalidParameterError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PLACE = VISION_MODELS["gemma3"].place
TIGHT = {"max_num_batched_tokens": 12, "max_num_seqs": 4}  # an image has 9 tokens


def test_precomputed_embeddings_take_the_place_of_an_image(seeing: GetCheckpoint, open_llm: OpenLLM) -> None:
    checkpoint, image = seeing("gemma3"), picture(30, 21, 1)
    seen = VISION_MODELS["gemma3"].seen(checkpoint.folder, torch.zeros(1, 1, dtype=torch.int64), [image])
    with torch.inference_mode():
        [embeddings] = checkpoint.reference.get_image_features(seen["pixel_values"]).pooler_output
    given: dict[str, Any] = {"image_embeds": embeddings.numpy()}
    prompt = f"See {PLACE} and {PLACE}, both."
    for options in ({}, TIGHT):
        llm = open_llm("gemma3", **options)
        ways = ([image, image], [given, image], [given, {**given, "image_grid_thw": [1, 6, 6]}])
        requests = [{"prompt": prompt, "images": images} for images in ways]
        outputs = llm.generate_multimodal(requests, GREEDY, use_tqdm=False)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_many_images_at_once_with_the_least_room(open_llm: OpenLLM) -> None:
    requests = [{"prompt": "x" * index + PLACE * 2, "images": [picture(9, 9, index)] * 2} for index in range(12)]
    expected = open_llm("gemma3").generate_multimodal(requests, GREEDY, use_tqdm=False)
    for options in (TIGHT, {**TIGHT, "step_target_s": 1e-9}, {**TIGHT, "num_kv_blocks": 64}):
        found = open_llm("gemma3", **options).generate_multimodal(requests, GREEDY, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


def test_a_step_without_room_for_an_image_is_refused(open_llm: OpenLLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"max_num_batched_tokens=11: at least 12: an image's 9 tokens"):
        open_llm("gemma3", max_num_batched_tokens=11, max_num_seqs=4)


def test_written_out_placeholders_are_taken_as_they_are(open_llm: OpenLLM) -> None:
    llm, images = open_llm("gemma3"), [picture(9, 9)]
    written = f"a\n\n{PLACE}" + "<|image_pad|>" * 9 + "<|vision_end|>\n\nb"
    ways = [{"prompt": f"a{PLACE}b", "images": images}, {"prompt": written, "images": images}]
    first, second = llm.generate_multimodal(ways, GREEDY, use_tqdm=False)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    other = {"image_embeds": torch.zeros(1, 36).numpy(), "image_grid_thw": [1, 2, 2]}
    with pytest.raises(InvalidParameterError, match=r"image_grid_thw=\[1, 2, 2\].*one size"):
        llm.generate_multimodal([{"prompt": PLACE, "images": [other]}], use_tqdm=False)
