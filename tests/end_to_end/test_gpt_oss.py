"""gpt-oss with experts in MXFP4 through the whole engine: one answer by every path, past its windows."""

from pathlib import Path
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.support import answers, random_prompt
from tests.models.gpt_oss import save_mxfp4, write_gguf

from octavo import LLM
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams

PROMPTS = [random_prompt(length, seed=length) for length in (3, 33, 20, 11)]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=9, ignore_eos=True, logprobs=1, seed=seed)
    for seed, temperature in enumerate((0.0, 0.9, 0.0, 1.5))
]
HALVES = pick(["bfloat16"], ["bfloat16", "float16"]) if native_kernels() is not None else []


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_same_bytes(dtype: str, tmp_path: Path) -> None:
    """Alone; in a batch with chunks, too little memory, and prefixes from the cache; from the other layout."""
    save_mxfp4(tmp_path, swiglu_limit=7.0, swiglu_alpha=1.702)
    options: dict[str, Any] = {"dtype": dtype, "tokenizer": "demo", "max_model_len": 64, "block_size": 4}
    with LLM(str(tmp_path), num_kv_blocks=128, enable_prefix_caching=False, **options) as alone:
        expected = [answers(alone.generate([p], s, use_tqdm=False))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    with LLM(str(file), num_kv_blocks=17, max_num_batched_tokens=13, **options) as together:
        outputs = [together.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(2)]
        together.engine.check_integrity()
    assert [answers(each) for each in outputs] == [expected] * 2
    assert sum(output.metrics.num_preemptions for each in outputs for output in each) > 0
    assert max(output.metrics.num_cached_tokens for output in outputs[1]) > 0
