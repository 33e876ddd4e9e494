"""Requests as they come: special tokens, padded vocabularies, tenants, parameters for one or for all."""

import pytest
from tests.end_to_end.support import PROMPT, complete, random_prompt
from tests.models.tiny import TinyModel

from octavo import LLM
from octavo.sampling_params import SamplingParams


def test_special_tokens_are_shown_on_request(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    special = tokenizer.encode("<|im_end|>")
    assert len(special) == 1
    hidden = complete(llm, logit_bias={special[0]: 100.0}, max_tokens=3)
    assert (hidden.token_ids, hidden.text) == (special * 3, "")
    assert complete(llm, logit_bias={special[0]: 100.0}, max_tokens=3, skip_special_tokens=False).text == (
        "<|im_end|>" * 3
    )


def test_ids_beyond_the_tokenizer_read_as_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Models pad their vocabulary; such an id may be sampled, fed back and rated like any other."""
    folder = tmp_path_factory.mktemp("padded")
    TinyModel(name="padded", family="Qwen3", settings={"vocab_size": 5000}).save(folder)
    with LLM(str(folder), tokenizer="demo", dtype="float32", num_kv_blocks=8) as llm:
        sample = complete(llm, logit_bias={4999: 1000.0 / 10}, logprobs=1, allowed_token_ids=[4999])
        assert (sample.token_ids, sample.text, sample.finish_reason) == ([4999] * 24, "", "length")
        assert sample.logprobs is not None
        assert sample.logprobs[0][4999].decoded_token == ""
        [output] = llm.generate({"prompt_token_ids": [4999, 7, 4998]}, SamplingParams(), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"


def test_tenants_share_no_blocks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for salt, num_cached in (("a", 0), ("b", 0), (None, 0), ("a", 8), (None, 8)):
        [output] = llm.engine.generate(PROMPT, params, cache_salt=salt)
        assert output.metrics.num_cached_tokens == num_cached


def test_one_set_of_params_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 9)]
    shared = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in shared] == [4, 4]
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 7)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(prompts, each, use_tqdm=False)] == [2, 7]
