"""Every family gives the greedy tokens of transformers, with its image processor, in float32."""

from typing import Any

import pytest
import torch
from PIL import Image
from tests.breadth import pick
from tests.end_to_end.conftest import Checkpoint, GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import PLACE, VISION_MODELS, picture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from octavo import SamplingParams
from octavo.outputs import RequestOutput

NUM_TOKENS = pick(5, 12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": f"Two: {PLACE} and {PLACE}.", "images": [picture(30, 21, 1), picture(8, 8, 2)]},  # the smallest grid
    {"prompt": f"{PLACE}", "images": [picture(6, 120, 3)]},  # 20:1, one merged square wide, nothing before
    {
        "prompt": f"Large {PLACE}{PLACE}",
        "images": [picture(300, 200, 4), picture(1, 1, 5)],
    },  # over and under the limits
    {"prompt": f"Twice {PLACE}{PLACE} the same", "images": [picture(17, 23, 6), picture(17, 23, 6)]},
    {"prompt": "No image at all"},
]


def expected_tokens(name: str, checkpoint: Checkpoint, output: RequestOutput, images: list[Image.Image]) -> list[int]:
    """Return the greedy continuation of transformers."""
    ids = torch.tensor([output.prompt_token_ids])
    seen = VISION_MODELS[name].seen(checkpoint.folder, ids, images)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    made = checkpoint.reference.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **seen, **options)
    tokens: list[int] = made[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("name", VISION_MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, seeing: GetCheckpoint, open_llm: OpenLLM) -> None:
    checkpoint, llm, write = seeing(name), open_llm(name), VISION_MODELS[name].with_place
    requests = [{**request, "prompt": write(request["prompt"])} for request in REQUESTS]
    outputs = llm.generate_multimodal(requests, GREEDY, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        expected = expected_tokens(name, checkpoint, output, request.get("images", []))
        assert output.outputs[0].token_ids == expected, request["prompt"]


@pytest.mark.parametrize("name", ["qwen2-vl", "llava", "gemma3"])
def test_images_in_the_middle_of_a_conversation(name: str, seeing: GetCheckpoint, open_llm: OpenLLM) -> None:
    checkpoint, llm = seeing(name), open_llm(name)
    images = [picture(20, 30, 1), picture(12, 9, 2)]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "image", "image": images[0]}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "image": images[1]}]},
    ]
    [by_chat] = llm.chat(messages, GREEDY)
    [by_request] = llm.generate_multimodal([{"messages": messages}], GREEDY, use_tqdm=False)
    assert by_chat.outputs[0].token_ids == by_request.outputs[0].token_ids
    assert by_chat.outputs[0].token_ids == expected_tokens(name, checkpoint, by_chat, images)


class CallersProcessor:
    """The interface of transformers' processors, which expand placeholders themselves."""

    def __init__(self, folder: Any, llm: Any) -> None:
        self._images, self._tokenizer = Qwen2VLImageProcessorPil.from_pretrained(folder), llm.get_tokenizer()

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        text: str = self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return text

    def __call__(self, *, text: list[str], images: Any, return_tensors: str) -> dict[str, Any]:
        made = dict(self._images(images, return_tensors=return_tensors))
        [prompt] = text
        for grid in made["image_grid_thw"]:
            prompt = prompt.replace("<|image_pad|>", "<|pad|>" * (int(grid.prod()) // 4), 1)
        return {"input_ids": [self._tokenizer.encode(prompt.replace("<|pad|>", "<|image_pad|>"))], **made}


def test_a_callers_own_processor(seeing: GetCheckpoint, open_llm: OpenLLM) -> None:
    llm, request = open_llm("qwen2-vl"), REQUESTS[0]
    processor = CallersProcessor(seeing("qwen2-vl").folder, llm)
    chat = {"messages": [{"role": "user", "content": [{"type": "image", "image": picture(9, 9)}]}]}
    ours = llm.generate_multimodal([request, chat], GREEDY, use_tqdm=False)
    theirs = llm.generate_multimodal([request, chat], GREEDY, processor, use_tqdm=False)
    assert [output.prompt_token_ids for output in theirs] == [output.prompt_token_ids for output in ours]
    assert [output.outputs[0].token_ids for output in theirs] == [output.outputs[0].token_ids for output in ours]
