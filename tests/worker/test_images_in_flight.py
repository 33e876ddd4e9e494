"""Images on a device with a queue: two steps in flight, and decode steps of text replayed beside them."""

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.queued_device import RecordedQueue
from tests.multimodal.tiny import PLACE, VISION_MODELS, picture
from tests.worker.conftest import Place

from octavo import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=7, logprobs=1, ignore_eos=True)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": f"Some text {PLACE} and {PLACE}", "images": [picture(40, 30, 1), picture(8, 8, 2)]},
    {"prompt": f"{PLACE}", "images": [picture(40, 30, 1)]},
    {"prompt": "Text alone"},
]


def answers(folder: Path, batches: list[list[dict[str, Any]]]) -> list[tuple[list[int], Any]]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 128}
    llm = LLM(str(folder), max_model_len=128, max_num_batched_tokens=20, max_num_seqs=4, **options)
    outputs = [output for batch in batches for output in llm.generate_multimodal(batch, PARAMS, use_tqdm=False)]
    llm.engine.check_integrity()
    llm.exit()
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_steps_in_flight_and_graphs(name: str, place: Place, tmp_path: Path) -> None:
    VISION_MODELS[name].save(tmp_path)
    expected = answers(tmp_path, [[request] for request in REQUESTS])
    place.queue = queue = RecordedQueue()
    assert answers(tmp_path, [REQUESTS, [REQUESTS[-1]]]) == [*expected, expected[-1]]
    assert queue.replays
