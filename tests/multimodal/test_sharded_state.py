"""A model that sees, saved as its ranks hold it: patch embeddings are convolutions in checkpoints, and linears here."""

from pathlib import Path

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import MAX_LEN, PLACE, VISION_MODELS, picture

from octavo import LLM, SamplingParams
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("name", pick(["qwen2.5-vl"], list(VISION_MODELS)))
def test_same_bits(name: str, seeing: GetCheckpoint, open_llm: OpenLLM, tmp_path: Path) -> None:
    request = {"prompt": VISION_MODELS[name].with_place(f"What is {PLACE}?"), "images": [picture(40, 30, 1)]}
    out = tmp_path / "out"
    convert(Checkpoint.open(str(seeing(name).folder)), out, "sharded_state", TargetOptions(tensor_parallel_size=1))
    sharded = LLM(str(out), dtype="float32", max_model_len=MAX_LEN, block_size=4, num_kv_blocks=64)
    try:
        [found], [expected] = (
            llm.generate_multimodal([request], PARAMS, use_tqdm=False) for llm in (sharded, open_llm(name))
        )
    finally:
        sharded.exit()
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
