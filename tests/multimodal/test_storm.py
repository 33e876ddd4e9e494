"""Many clients at once, of which some leave: requests with and without images in one server process."""

import asyncio
import random

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.tiny import MAX_LEN, PLACE, VISION_MODELS, picture

from octavo import AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
REQUESTS: list[dict[str, object]] = [
    {"prompt": "Only text, and more than a block of it."},
    {"prompt": f"One {PLACE} with text around it", "images": [picture(40, 30, 1)]},
    {"prompt": f"{PLACE}{PLACE}", "images": [picture(40, 30, 1), picture(9, 70, 3)]},
    {"prompt": f"Behind a block of text: {PLACE}", "images": [picture(60, 60, 4)]},
    {"messages": [{"role": "user", "content": [{"type": "image", "image": picture(30, 50, 5)}]}]},
]


@pytest.mark.parametrize("name", pick(["qwen2.5-vl"], [*VISION_MODELS]))
async def test_who_leaves_takes_everything_along(name: str, seeing: GetCheckpoint) -> None:
    chance = random.Random(1)
    options = {"num_kv_blocks": 80, "max_num_batched_tokens": 24, "max_num_seqs": 16, "encoder_cache_tokens": 64}
    options |= {"block_size": 4, "engine_process": RUNS_ALL}  # tests/server/test_images.py has a core of its own
    async with AsyncLLM(str(seeing(name).folder), dtype="float32", max_model_len=MAX_LEN, **options) as llm:
        alone = [(await llm.generate_multimodal([request], PARAMS))[0].text for request in REQUESTS]
        chosen = [chance.randrange(len(REQUESTS)) for _ in range(pick(50, 200))]
        tasks = [asyncio.create_task(llm.generate_multimodal([REQUESTS[index]], PARAMS)) for index in chosen]
        for task in chance.sample(tasks, len(tasks) // 3):
            await asyncio.sleep(chance.random() * 0.02)
            task.cancel()
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        engine = await llm.engine()
        while engine.front.outputs:
            await asyncio.sleep(0.01)
        await engine.call("check_integrity")  # blocks, rows, embeddings and who holds them
    finished = [(index, whole) for index, whole in zip(chosen, outputs, strict=True) if isinstance(whole, list)]
    assert len(tasks) // 2 < len(finished) < len(tasks)
    assert all(whole[0].text == alone[index] for index, whole in finished)
    assert all(isinstance(whole, list | asyncio.CancelledError) for whole in outputs)
