"""What goes wrong stays with the request that it went wrong for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.end_to_end.conftest import GetCheckpoint, MakeLLM
from tests.end_to_end.support import answer, random_prompt, random_tokens

from octavo import LLM
from octavo.errors import InvalidParameterError, PromptTooLongError, UnknownOptionError
from octavo.inputs import Prompt
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

POISON = 96  # the one token whose embedding is NaN
SEEDED = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=2, logit_bias={POISON: -100.0})


@pytest.fixture(scope="module")
def poisoned(checkpoint: GetCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a checkpoint in which one token turns its own context, and no other, into NaN."""
    source, folder = checkpoint("qwen3").folder, tmp_path_factory.mktemp("poisoned")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def finish(llm: LLM) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.engine.step()[0]}
    return last


@pytest.mark.parametrize("wants_prompt_logprobs", [False, True])
def test_nan_fails_its_own_request_only(poisoned: Path, wants_prompt_logprobs: bool) -> None:
    with LLM(str(poisoned), tokenizer="demo", dtype="float32", block_size=4, num_kv_blocks=64) as llm:
        healthy: list[Prompt] = [random_prompt(length, seed=length) for length in (5, 14)]
        sick: Prompt = {"prompt_token_ids": [*random_tokens(6, seed=1), POISON, 7]}
        params = [SEEDED, SEEDED.replace(prompt_logprobs=1 if wants_prompt_logprobs else None), SEEDED]
        expected = [answer(llm.generate(prompt, SEEDED, use_tqdm=False)[0]) for prompt in healthy]
        for _ in range(2):  # the second time, prefixes may be in the cache
            outputs = llm.generate([healthy[0], sick, healthy[1]], params, use_tqdm=False)
            assert [answer(outputs[at]) for at in (0, 2)] == expected
            [failed] = outputs[1].outputs
            assert (failed.finish_reason, failed.token_ids) == ("error", [])
            assert failed.error is not None
            assert "NaN" in failed.error or "finite" in failed.error
        llm.engine.check_integrity()


def test_a_request_that_bans_every_token_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm("qwen3")
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=3)
    outputs = llm.generate([random_prompt(5, seed=1)] * 2, [impossible, SamplingParams()], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "min_tokens" in str(outputs[0].outputs[0].error)
    assert outputs[1].outputs[0].finish_reason in ("length", "stop")


def test_refused_requests_leave_the_running_ones_alone(make_llm: MakeLLM) -> None:
    llm = make_llm("qwen3")
    prompt = random_prompt(9, seed=2)
    expected = answer(llm.generate(prompt, SEEDED, use_tqdm=False)[0])
    running = llm.engine.add_request(prompt, SEEDED)
    llm.engine.step()
    with pytest.raises(PromptTooLongError, match="64"):
        llm.engine.add_request(random_prompt(64, seed=0))
    with pytest.raises(InvalidParameterError, match="logit_bias"):
        llm.engine.add_request(prompt, SamplingParams(logit_bias={97: 1.0}))
    with pytest.raises(InvalidParameterError, match="temperature"):
        llm.engine.add_request(prompt, SamplingParams(temperature=-1.0))
    with pytest.raises(UnknownOptionError, match="temperature"):
        llm.engine.add_request(prompt, SamplingParams.from_options({"temprature": 1.0}))
    with pytest.raises(InvalidParameterError, match="prompt_token_ids"):
        llm.engine.add_request({"prompt_token_ids": [3, 97]})
    outputs = finish(llm)
    assert list(outputs) == [running]
    assert answer(outputs[running]) == expected


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_an_abort_ends_one_request_and_frees_its_blocks(num_steps: int, make_llm: MakeLLM) -> None:
    llm = make_llm("qwen3", max_num_batched_tokens=16)
    prompts = [random_prompt(length, seed=length) for length in (20, 30)]
    expected = answer(llm.generate(prompts[1], SEEDED, use_tqdm=False)[0])
    aborted, kept = (llm.engine.add_request(prompt, SEEDED) for prompt in prompts)
    early: dict[str, RequestOutput] = {}
    for _ in range(num_steps):
        early |= {output.request_id: output for output in llm.engine.step()[0]}
    llm.engine.abort_request(aborted)
    outputs = early | finish(llm)
    assert outputs[aborted].outputs[0].finish_reason == "abort"
    assert answer(outputs[kept]) == expected


def test_an_abort_of_nobody_is_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm("qwen3")
    llm.engine.abort_request("nobody")
    assert llm.engine.step() == ([], 0)
