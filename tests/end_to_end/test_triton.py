"""Whole engines on Triton's kernels, interpreted on a CPU: the tokens of the CPU's own kernels, by every path."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import MakeLLM
from tests.end_to_end.support import random_prompt
from tests.kernels.triton.device import DEVICE

from octavo import LLM
from octavo.attention import triton_paged
from octavo.device.cpu import CpuKind
from octavo.sampling_params import SamplingParams
from octavo.testing_device import CalledQueue

PROMPTS = [random_prompt(length, seed=length) for length in (3, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
MODELS = ["llama-biases", "qwen3-mixed-windows", "qwen2-moe"]


@pytest.fixture
def make_pair(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LLM, LLM]]:
    """Return what makes a model on the CPU's own kernels, and on Triton's with these options."""

    def make(name: str, **options: Any) -> tuple[LLM, LLM]:
        plain = make_llm(name, device="cpu")
        monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
        return plain, make_llm(name, device=DEVICE.type, **options)

    return make


def tokens_of(llm: LLM, prompts: list[Any]) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the names of attention's launches will be added to."""
    seen: list[str] = []

    def wrap(name: str) -> Any:
        launch = getattr(triton_paged, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return launch(*args, **kwargs)

        return watched

    for name in ("rotate_and_write", "attend_few", "attend_many"):
        monkeypatch.setattr(triton_paged, name, wrap(name))
    return seen


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has a queue of its own")
def test_padded_steps_on_static_tensors_give_the_same_tokens(
    make_pair: Callable[..., tuple[LLM, LLM]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What CUDA graphs capture, without the capture: 3 rows in a bucket of 4, lengths on the host as bounds."""
    queue, prompts = CalledQueue(), [*PROMPTS, random_prompt(2, seed=2)]
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(CpuKind, "queue", lambda kind: queue if "OCTAVO_GPU_KERNELS" in os.environ else None)
    plain, triton = make_pair("qwen3-mixed-windows", max_num_seqs=4)
    assert tokens_of(triton, prompts) == tokens_of(plain, prompts)
    assert queue.captures
    assert queue.replays


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_cpu(
    name: str, make_pair: Callable[..., tuple[LLM, LLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decodes, then found in the prefix cache."""
    plain, triton = make_pair(name, max_num_batched_tokens=36)
    expected = tokens_of(plain, PROMPTS)
    kernels = watch(monkeypatch)
    assert tokens_of(triton, PROMPTS) == expected
    assert tokens_of(triton, PROMPTS[1:]) == expected[1:]
    assert set(kernels) == {"rotate_and_write", "attend_few", "attend_many"}
