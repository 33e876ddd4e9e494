"""What each sampling parameter promises, kept by a whole engine on a real (tiny, random) model."""

import itertools
from typing import Any

import pytest
import torch
from tests.end_to_end.conftest import Checkpoint, GetCheckpoint, MakeLLM
from tests.end_to_end.support import random_prompt
from tests.models.tiny import VOCAB_SIZE, TinyModel
from tests.sampling.reference import draw

from octavo import LLM
from octavo.outputs import CompletionOutput
from octavo.sampling_params import SamplingParams

PROMPT = random_prompt(11, seed=3)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(checkpoint: GetCheckpoint) -> Checkpoint:
    return checkpoint("qwen3")


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm("qwen3")


def complete(llm: LLM, **options: Any) -> CompletionOutput:
    """Continue PROMPT, greedily for 24 tokens unless told otherwise."""
    params = SamplingParams.from_options({**GREEDY, **options})
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]


def test_a_stop_string_ends_the_text_before_itself(llm: LLM) -> None:
    whole = complete(llm)
    stop = whole.text[5:8]
    stopped = complete(llm, stop=["never in it", stop])
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < len(whole.token_ids)
    shown = complete(llm, stop=stop, include_stop_str_in_output=True)
    assert shown.text == stopped.text + stop


def test_a_stop_token_ends_the_text_before_itself(llm: LLM) -> None:
    whole = complete(llm)
    stop = whole.token_ids[6]
    end = whole.token_ids.index(stop) + 1
    stopped = complete(llm, stop_token_ids=[stop])
    assert stopped.token_ids == whole.token_ids[:end]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    decode = llm.get_tokenizer().decode
    assert stopped.text == decode(whole.token_ids[: end - 1])
    shown = complete(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == decode(whole.token_ids[:end])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_own_end_token_stops_unless_ignored(ignore_eos: bool, llm: LLM) -> None:
    ended = complete(llm, logit_bias={2: 100.0}, ignore_eos=ignore_eos)
    if ignore_eos:
        assert (ended.token_ids, ended.finish_reason) == ([2] * 24, "length")
    else:
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason, ended.text) == ([2], "stop", None, "")


def test_ends_and_defaults_come_from_the_generation_config(
    tmp_path_factory: pytest.TempPathFactory, model: Checkpoint
) -> None:
    folder = tmp_path_factory.mktemp("defaults")
    for file in model.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 41], "temperature": 0.25, "top_k": 7}')
    with LLM(str(folder), tokenizer="demo", dtype="float32", num_kv_blocks=8) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.25, 7, 1.0)
        ended = complete(llm, logit_bias={41: 100.0}, ignore_eos=False)
        assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([41], "stop", None)
    with LLM(str(folder), tokenizer="demo", dtype="float32", num_kv_blocks=8, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_tenants_share_no_blocks(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for salt, num_cached in (("a", 0), ("b", 0), (None, 0), ("a", 8), (None, 8)):
        [output] = llm.engine.generate(PROMPT, params, cache_salt=salt)
        assert output.metrics.num_cached_tokens == num_cached


def test_min_tokens_holds_ends_back_and_no_longer(llm: LLM) -> None:
    ended = complete(llm, logit_bias={2: 100.0, 7: 90.0}, stop_token_ids=[7], ignore_eos=False, min_tokens=5)
    assert len(ended.token_ids) == 6
    assert not {2, 7} & set(ended.token_ids[:5])
    assert (ended.token_ids[5], ended.finish_reason) == (2, "stop")


def test_min_tokens_holds_stop_strings_back(llm: LLM) -> None:
    everything = [chr(code) for code in range(32, 90)]
    stopped = complete(llm, stop=everything, min_tokens=9)
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) >= 9
    assert len(complete(llm, stop=everything).token_ids) < 9


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens_is_exact(max_tokens: int, llm: LLM) -> None:
    whole = complete(llm)
    capped = complete(llm, max_tokens=max_tokens)
    assert (capped.token_ids, capped.finish_reason) == (whole.token_ids[:max_tokens], "length")


def test_without_max_tokens_the_context_is_the_cap(llm: LLM) -> None:
    assert len(complete(llm, max_tokens=None).token_ids) == 64 - 11


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


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8, "min_p": 0.02}])
def test_a_token_is_a_pure_function(options: dict[str, Any], llm: LLM, model: Checkpoint) -> None:
    """token[i] = sample(logits(prompt + token[:i]), params, noise(seed, i)), worked out from transformers' logits."""
    params = SamplingParams.from_options({"seed": 2**63 + 17, "max_tokens": 24, "ignore_eos": True, **options})
    tokens = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    with torch.inference_mode():
        logits = model.reference(torch.tensor([PROMPT["prompt_token_ids"] + tokens])).logits[0, 10:-1]  # [24, V]
    assert tokens == [draw(row, params, index) for index, row in enumerate(logits.tolist())]


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


def test_the_context_may_be_filled_to_the_last_token(llm: LLM) -> None:
    for length in (60, 62, 63):
        params = SamplingParams.from_options({**GREEDY, "max_tokens": None})
        [output] = llm.generate(random_prompt(length, seed=length), params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 64 - length
        assert output.outputs[0].finish_reason == "length"


def test_one_set_of_params_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 9)]
    shared = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in shared] == [4, 4]
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 7)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(prompts, each, use_tqdm=False)] == [2, 7]


def test_every_token_can_be_drawn(llm: LLM) -> None:
    """At a high temperature 600 tokens of many requests visit the whole vocabulary."""
    params = SamplingParams(temperature=50.0, max_tokens=50, ignore_eos=True, n=14, seed=0)
    [output] = llm.generate(random_prompt(4, seed=1), params, use_tqdm=False)
    drawn = set(itertools.chain.from_iterable(sample.token_ids for sample in output.outputs))
    assert len(drawn) > 0.97 * VOCAB_SIZE
