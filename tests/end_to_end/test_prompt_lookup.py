"""Prompt lookup from the option to the answer: the bytes of no drafts, and fewer steps."""

from typing import Any

import pytest
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_tokens
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS

from octavo import SamplingParams
from octavo.errors import InvalidParameterError
from octavo.inputs import Prompt

PERIOD = random_tokens(9, seed=5)
REPEATED: list[Prompt] = [{"prompt_token_ids": PERIOD * 3 + PERIOD[:end]} for end in (2, 5, 9)]
GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24, ignore_eos=True)
LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


@pytest.mark.parametrize("name", ["llama", "qwen3-mixed-windows in bfloat16"])
def test_answers_and_metrics(name: str, checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    prompts, params = [*REPEATED, *PROMPTS], [GREEDY] * len(REPEATED) + PARAMS
    with open_llm(checkpoint, name) as llm:
        expected = answers(llm.generate(prompts, params, use_tqdm=False))
    always = {**LOOKUP, "adaptive": False}
    settings: list[dict[str, Any]] = [
        {"speculative_config": always},
        {"speculative_config": LOOKUP, "num_kv_blocks": MAX_LEN // BLOCK_SIZE, "max_num_batched_tokens": 24},
    ]
    for options in settings:
        llm = make_llm(name, **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert answers(outputs) == expected
        if options["speculative_config"] is always:  # otherwise it is a matter of time
            assert all(output.metrics.num_accepted_drafts > 0 for output in outputs[: len(REPEATED)])
        (declined,) = llm.generate(REPEATED[:1], GREEDY.replace(speculative=False), use_tqdm=False)
        assert answers([declined]) == expected[:1]
        assert declined.metrics.num_drafts == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "method: one of ngram, draft_model"),
        ({"method": "medusa"}, "not supported by this version yet; one of ngram, draft_model, eagle3, mtp, none"),
        ({"method": "deepseek_mtp"}, "there is no MTP head for LlamaForCausalLM in"),
        ({"method": "eagle3"}, "the EAGLE-3 head: a folder or Hub id"),
        ({"method": "magic"}, "one of ngram"),
        ({"method": "draft_model"}, "the draft model: a folder"),
        ({"method": "ngram", "model": "demo"}, "only for methods draft_model, eagle3 and mtp, not ngram"),
        ({"model": "demo", "quantization": "int3"}, "one of int8, int4"),
        ({"model": "demo", "quantization": "gguf"}, "{'quantization': 'gguf'}: needs a GGUF file"),
        ({"model": "demo", "revision": 3}, "a branch, tag or commit"),
        ({"model": "demo", "prompt_lookup_max": 3}, "only for method ngram, not draft_model"),
        ({"model": "demo", "draft_tensor_parallel_size": 2}, "1: a draft model runs whole on every rank"),
        ({"method": "ngram", "num_speculative_token": 3}, "unknown key 'num_speculative_token'; one of method, num"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "an integer between 1 and 64"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "an integer between 5 and 128"),
        ({"prompt_lookup_max": 129}, "{'prompt_lookup_max': 129}: an integer between 1 and 128"),
        ({"method": "ngram", "adaptive": 1}, "must be true or false"),
        ("{", "not valid JSON"),
        pytest.param("[" * 100_000, "not valid JSON", id="deep"),
        ("[]", "must be a JSON object"),
        (3, "must be a string or a mapping"),
    ],
)
def test_bad_settings_name_the_key(options: Any, error: str, make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidParameterError, match=error) as caught:
        make_llm("llama", speculative_config=options)
    assert caught.value.field == "speculative_config"
