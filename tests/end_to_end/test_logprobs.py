"""Logprobs of outputs and prompts are those of the model, by transformers' reckoning."""

import pytest
import torch
from tests.end_to_end.conftest import Checkpoint, MakeLLM
from tests.end_to_end.support import GREEDY, PROMPT, complete

from octavo import LLM
from octavo.sampling_params import SamplingParams


def test_logprobs_are_the_models(llm: LLM, model: Checkpoint) -> None:
    sample = complete(llm, logprobs=4, temperature=1.5, top_k=10, seed=5, presence_penalty=1.0)
    with torch.inference_mode():
        logits = model.reference(torch.tensor([PROMPT["prompt_token_ids"] + sample.token_ids])).logits[0]
    expected = logits.double().log_softmax(-1)[10:-1]  # [24, V]
    assert sample.logprobs is not None
    assert len(sample.logprobs) == 24
    for entry, token_id, row in zip(sample.logprobs, sample.token_ids, expected, strict=True):
        best = row.argsort(descending=True)[:4].tolist()
        assert list(entry) == list(dict.fromkeys([token_id, *best]))
        assert [one.logprob for one in entry.values()] == pytest.approx(row[list(entry)].tolist(), abs=1e-4)
        assert [one.rank for one in entry.values()] == [int((row > row[at]).sum()) + 1 for at in entry]
        assert entry[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)
    chosen = [entry[token_id].logprob for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 5])
def test_prompt_logprobs_cover_the_prompt_and_bypass_the_cache(
    max_num_batched_tokens: int, make_llm: MakeLLM, model: Checkpoint
) -> None:
    llm = make_llm("qwen3", max_num_batched_tokens=max_num_batched_tokens)
    prompt = PROMPT["prompt_token_ids"]
    with torch.inference_mode():
        logits = model.reference(torch.tensor([prompt])).logits[0]
    expected = logits.double().log_softmax(-1)
    complete(llm)  # fills the cache
    for _ in range(2):
        params = SamplingParams.from_options({**GREEDY, "prompt_logprobs": 2})
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        assert output.metrics.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for entry, token_id, row in zip(output.prompt_logprobs[1:], prompt[1:], expected[:-1], strict=True):
            assert entry is not None
            best = row.argsort(descending=True)[:2].tolist()
            assert list(entry) == list(dict.fromkeys([token_id, *best]))
            assert [one.logprob for one in entry.values()] == pytest.approx(row[list(entry)].tolist(), abs=1e-4)
    [output] = llm.generate(PROMPT, SamplingParams.from_options(GREEDY), use_tqdm=False)
    assert output.metrics.num_cached_tokens == 8
