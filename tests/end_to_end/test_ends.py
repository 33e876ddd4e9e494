"""When a request ends, and what of its end is shown: stop strings and tokens, end tokens, min and max tokens."""

import pytest
from tests.end_to_end.conftest import Checkpoint
from tests.end_to_end.support import GREEDY, complete, random_prompt

from octavo import LLM
from octavo.sampling_params import SamplingParams


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


def test_the_context_may_be_filled_to_the_last_token(llm: LLM) -> None:
    for length in (60, 62, 63):
        params = SamplingParams.from_options({**GREEDY, "max_tokens": None})
        [output] = llm.generate(random_prompt(length, seed=length), params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 64 - length
        assert output.outputs[0].finish_reason == "length"
