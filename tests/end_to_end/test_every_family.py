"""What holds for any family through `LLM`: prefixes from the cache, integers at load, adapters on ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, MakeLLM
from tests.end_to_end.support import answers, random_prompt
from tests.lora.adapters import save_adapter
from tests.models.hybrid import keep_states_often
from tests.models.tiny import TINY_MODELS, by_name
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM, LoRARequest
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams

# Branches side by side, with windows; fused weights, of which a part of each head rotates; states beside attention.
FAMILIES = pick(["cohere2", "phi3-long", "falcon-h1"], [case.name for case in TINY_MODELS])
MODULES = {
    "falcon-h1": ["q_proj", "o_proj", "gate_proj", "down_proj"],
    "phi3-long": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "qwen3-5": ["q_proj", "k_proj", "o_proj", "up_proj"],  # queries have gates between them
}
ADAPTED = [
    "cohere2",
    "llama-biases",
    "glm4",
    "gemma2",
    "gemma4-shared",
    "cohere-plus",
    "olmo2",
    "exaone4",
    "granite-hybrid",
    "lfm3",
]
PROMPTS = [random_prompt(length, seed=length) for length in (3, 30, 20, 30)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1, seed=1)


@pytest.fixture(autouse=True)
def _states_are_kept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_states_often(monkeypatch)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_prefixes_change_nothing(name: str, make_llm: MakeLLM) -> None:
    alone = answers(make_llm(name, enable_prefix_caching=False).generate(PROMPTS, PARAMS, use_tqdm=False))
    llm = make_llm(name, max_num_batched_tokens=16, num_kv_blocks=48)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert answers(outputs) == alone
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0


@pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels quantize")
@pytest.mark.parametrize("name", FAMILIES)
def test_integers_alone_and_in_a_batch(name: str, make_llm: MakeLLM) -> None:
    llm = make_llm(name, dtype="bfloat16", quantization="int8")
    alone = [answers(llm.generate([prompt], PARAMS, use_tqdm=False))[0] for prompt in PROMPTS]
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


@pytest.mark.parametrize("name", pick(["phi3-long", "qwen3-5"], [*MODULES, *ADAPTED]))
def test_adapters_on_ranks_are_merged_weights(
    name: str, checkpoint: GetCheckpoint, make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"target_modules": MODULES[name]} if name in MODULES else {}
    save_adapter(by_name(name).build(), tmp_path / "adapter", **options).merge_and_unload().save_pretrained(
        tmp_path / "merged"
    )
    with LLM(str(tmp_path / "merged"), tokenizer="demo", dtype="float32", max_model_len=64) as merged:
        expected = tokens_of(merged)
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    llm = make_llm(name, enable_lora=True, tensor_parallel_size=2)
    assert tokens_of(llm, LoRARequest("adapter", 1, tmp_path / "adapter")) == expected
    assert tokens_of(llm) != expected


def tokens_of(llm: LLM, adapter: LoRARequest | None = None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapter)
    return [output.outputs[0].token_ids for output in outputs]


def test_angles_of_longrope_are_those_that_a_request_may_need(make_llm: MakeLLM, checkpoint: GetCheckpoint) -> None:
    """Up to 16 tokens, transformers' short ones; beyond, its long ones. The same prompt has keys of both kinds."""
    reference, llm = checkpoint("phi3-long").reference, make_llm("phi3-long")
    for length, max_tokens in ((7, 9), (20, 9), (7, 9)):
        prompt = random_prompt(length, seed=1)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        ids = torch.tensor([prompt["prompt_token_ids"]])
        expected = reference.generate(ids, do_sample=False, max_new_tokens=max_tokens)[0, length:]
        assert output.outputs[0].token_ids == expected.tolist()
    assert output.metrics.num_cached_tokens == 4
    longer = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [after_both] = llm.generate(prompt, longer, use_tqdm=False)
    [alone] = make_llm("phi3-long").generate(prompt, longer, use_tqdm=False)
    assert after_both.outputs[0].token_ids == alone.outputs[0].token_ids
