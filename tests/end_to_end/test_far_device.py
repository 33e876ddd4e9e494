"""Whole engines on a device whose memory the host cannot read: every kind of request has the tokens of the CPU.

What runs on a GPU beside kernels: which side a tensor is on, and when it is copied.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, MakeLLM
from tests.end_to_end.support import random_prompt
from tests.end_to_end.test_adapters import LORA, make
from tests.end_to_end.test_draft_model import always, save_draft
from tests.fakes.far_device import FAR, FarMode, far_devices
from tests.fakes.queued_device import RecordedQueue
from tests.models.eagle import TinyHead

from octavo import LLM
from octavo.errors import InvalidParameterError
from octavo.sampling_params import SamplingParams
from octavo.structured_output import StructuredOutput

PROMPTS = [random_prompt(length, seed=length) for length in (3, 20, 9, 5)]
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, seed=1)
MIXED = [
    SHORT,
    SHORT.replace(temperature=0.8, seed=3, top_k=20, logprobs=2),
    SHORT.replace(repetition_penalty=1.3, logit_bias={5: 2.0}, prompt_logprobs=1, bad_words=["ab"], min_tokens=2),
    SHORT.replace(max_tokens=20, structured_output=StructuredOutput(regex="[a-c]{2,5}-[0-9]{3}"), ignore_eos=False),
]
queued = pytest.mark.parametrize("make_queue", pick([RecordedQueue], [RecordedQueue, lambda: None]))


def run(llm: LLM) -> list[Any]:
    """Return tokens and text, and the tokens that logprobs are of: other kernels have other last digits."""
    samples = [output.outputs[0] for output in llm.generate(PROMPTS, MIXED, use_tqdm=False)]
    return [(some.token_ids, some.text, [list(of) for of in some.logprobs or ()]) for some in samples]


@queued
@pytest.mark.parametrize("name", pick(["qwen3-mixed-windows"], ["qwen3-mixed-windows", "qwen2-moe", "gemma3"]))
def test_requests_of_all_kinds(name: str, make_queue: Callable[[], Any], make_llm: MakeLLM) -> None:
    """In chunks, with prefixes from the cache, and too little memory for all of them."""
    expected = run(make_llm(name, enforce_eager=True))
    with far_devices(make_queue):
        llm = make_llm(name, device="xpu", max_num_batched_tokens=18, num_kv_blocks=17)
        for _ in range(2):
            assert run(llm) == expected


@queued
def test_drafts(make_queue: Callable[[], Any], make_llm: MakeLLM, checkpoint: GetCheckpoint, tmp_path: Path) -> None:
    expected, draft = run(make_llm("llama")), save_draft(checkpoint("llama").folder, tmp_path)
    for config in ({"method": "ngram", "num_speculative_tokens": 3}, always(draft)):
        with far_devices(make_queue):
            assert run(make_llm("llama", device="xpu", speculative_config=config)) == expected


@queued
@pytest.mark.full
def test_adapters(make_queue: Callable[[], Any], make_llm: MakeLLM, tmp_path: Path) -> None:
    adapters = make("qwen3", tmp_path)
    prompts: list[Any] = [PROMPTS[2]] * len(adapters.requests)

    def generate(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, SHORT, lora_request=adapters.requests, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = generate(make_llm("qwen3", **LORA))
    with far_devices(make_queue):
        assert generate(make_llm("qwen3", device="xpu", **LORA)) == expected


def test_vectors(make_llm: MakeLLM) -> None:
    def embed(llm: LLM) -> list[Any]:
        return [output.embedding for output in llm.embed(PROMPTS)]

    expected = embed(make_llm("qwen3"))
    with far_devices():
        for found, wanted in zip(embed(make_llm("qwen3", device="xpu")), expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)


def test_what_runs_on_cpus_alone_is_refused(checkpoint: GetCheckpoint, make_llm: MakeLLM, tmp_path: Path) -> None:
    (head := TinyHead()).save(tmp_path / "head", head.tensors())
    config = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    with far_devices(), pytest.raises(InvalidParameterError, match="heads run on CPUs only"):
        make_llm("llama", device="xpu", speculative_config=config)


def test_the_double_refuses_what_a_gpu_refuses() -> None:
    with FarMode():
        far, near = torch.ones(3, device=FAR), torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            far + near
        with pytest.raises(RuntimeError, match="indices of lazy"):
            near[far.to(torch.int64)]
        with pytest.raises(TypeError, match="numpy"):
            far.numpy()
        far[torch.tensor([True, False, True])] = 5.0
        assert far.tolist() == [5.0, 1.0, 5.0]
