"""Which tokens a request is given: the definition itself, biases, bans, penalties and samples."""

import itertools
from typing import Any

import pytest
import torch
from tests.end_to_end.conftest import Checkpoint
from tests.end_to_end.support import PROMPT, complete, random_prompt
from tests.models.tiny import VOCAB_SIZE
from tests.sampling.reference import draw

from octavo import LLM
from octavo.sampling_params import SamplingParams


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8, "min_p": 0.02}])
def test_a_token_is_a_pure_function(options: dict[str, Any], llm: LLM, model: Checkpoint) -> None:
    """token[i] = sample(logits(prompt + token[:i]), params, noise(seed, i)), worked out from transformers' logits."""
    params = SamplingParams.from_options({"seed": 2**63 + 17, "max_tokens": 24, "ignore_eos": True, **options})
    tokens = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    with torch.inference_mode():
        logits = model.reference(torch.tensor([PROMPT["prompt_token_ids"] + tokens])).logits[0, 10:-1]  # [24, V]
    assert tokens == [draw(row, params, index) for index, row in enumerate(logits.tolist())]


def test_n_samples_differ_when_sampled_and_not_when_greedy(llm: LLM) -> None:
    params = SamplingParams(n=5, max_tokens=12, ignore_eos=True, seed=8)
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 5
    assert output.outputs[0].seed == 8
    [output] = llm.generate(PROMPT, params.replace(temperature=0.0), use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 1


def test_logit_bias_forces_and_forbids(llm: LLM) -> None:
    assert complete(llm, logit_bias={33: 100.0}).token_ids == [33] * 24
    said = set(complete(llm).token_ids)
    assert not said & set(complete(llm, logit_bias=dict.fromkeys(said, -100.0)).token_ids)


def test_only_allowed_ids_come_out(llm: LLM) -> None:
    allowed = {11, 22, 33, 44}
    sampled = complete(llm, allowed_token_ids=list(allowed), temperature=2.0, seed=1)
    assert set(sampled.token_ids) == allowed


def test_bad_words_never_appear(llm: LLM) -> None:
    whole = complete(llm).text
    banned = [*sorted(set(whole))[:3], whole[10:12]]
    assert all(word in whole for word in banned)
    text = complete(llm, bad_words=banned).text
    assert len(text) > 0
    assert not [word for word in banned if word in text]


def test_penalties_make_repeats_rarer(llm: LLM) -> None:
    def num_distinct(**options: float) -> int:
        return len(set(complete(llm, max_tokens=40, **options).token_ids))

    plain = num_distinct()
    assert num_distinct(presence_penalty=2.0) > plain
    assert num_distinct(frequency_penalty=2.0) > plain
    assert num_distinct(repetition_penalty=5.0) > plain


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.4}, {"min_new_tokens": 6, "eos_token_id": 2}])
def test_what_transformers_also_does_it_does_alike(options: dict[str, Any], llm: LLM, model: Checkpoint) -> None:
    tokens = torch.tensor([PROMPT["prompt_token_ids"]])
    whole = model.reference.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False, **options
    )
    renamed = {"min_tokens": options.get("min_new_tokens", 0), "ignore_eos": "eos_token_id" not in options}
    ours = complete(llm, repetition_penalty=options.get("repetition_penalty", 1.0), **renamed)
    assert ours.token_ids == whole[0, 11:].tolist()


def test_every_token_can_be_drawn(llm: LLM) -> None:
    """At a high temperature 600 tokens of many requests visit the whole vocabulary."""
    params = SamplingParams(temperature=50.0, max_tokens=50, ignore_eos=True, n=14, seed=0)
    [output] = llm.generate(random_prompt(4, seed=1), params, use_tqdm=False)
    drawn = set(itertools.chain.from_iterable(sample.token_ids for sample in output.outputs))
    assert len(drawn) > 0.97 * VOCAB_SIZE
