"""Adapters of every kind through `LLM`: PEFT's greedy tokens by every path, and the same bytes alone and in a batch."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import answers, random_prompt
from tests.lora.adapters import save_adapter
from tests.lora.test_exactness import KINDS, MODELS
from tests.models.test_exactness import reference_logits
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LoRARequest
from octavo.inputs import Prompt
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, seed=1)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 12}  # slots for fewer adapters than there are


class Adapters(NamedTuple):
    """Adapters of one tiny model, and PEFT's model of each."""

    requests: list[LoRARequest | None]
    references: list[Any]


def make(name: str, folder: Path) -> Adapters:
    """Make an adapter of every kind; the last request is for the base model."""
    made = Adapters([], [])
    for number, (kind, settings) in enumerate(KINDS.items()):
        made.references.append(save_adapter(MODELS[name].build(), folder / kind, seed=number, **settings))
        made.requests.append(LoRARequest(kind, number + 1, folder / kind))
    made.requests.append(None)
    made.references.append(MODELS[name].build())
    return made


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return make("qwen3", tmp_path_factory.mktemp("adapters"))


def prompts_for(adapters: Adapters) -> list[Prompt]:
    """Return the same prompt for all, twice: its blocks must not be shared."""
    return [random_prompt(13, seed=3)] * len(adapters.requests)


def assert_greedy(reference: Any, prompt: Any, tokens: list[int]) -> None:
    context = list(prompt["prompt_token_ids"])
    for token, logits in zip(tokens, reference_logits(reference, context + tokens)[len(context) - 1 :], strict=False):
        assert logits[token] > logits.max() - 1e-3  # a near tie may go either way


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enforce_eager": True}, marks=pytest.mark.full),
        {"max_num_batched_tokens": 16, "num_kv_blocks": 40},
        pytest.param({"tensor_parallel_size": 2}, id="TP 2"),
        pytest.param({"pipeline_parallel_size": 2}, id="PP 2", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_peft(
    options: dict[str, Any], adapters: Adapters, checkpoint: GetCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if {"tensor_parallel_size", "pipeline_parallel_size"} & options.keys() and not RUNS_ALL:
        monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    prompts = prompts_for(adapters)
    with open_llm(checkpoint, "qwen3", **LORA, **options) as llm:
        for _ in range(2):  # with prefixes in the cache at the second time
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters.requests)
            for output, prompt, reference in zip(outputs, prompts, adapters.references, strict=True):
                assert_greedy(reference, prompt, list(output.outputs[0].token_ids))
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > len(outputs) // 2
        llm.engine.check_integrity()


def test_a_prefix_on_disk_is_one_adapters_own(
    adapters: Adapters, checkpoint: GetCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    prompts, of_runs = prompts_for(adapters), []
    for num_first in (0, 1):  # the second engine asks in another order
        with open_llm(checkpoint, "qwen3", **LORA, prefix_cache_disk=0.1) as llm:
            requests = adapters.requests[num_first:] + adapters.requests[:num_first]
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=requests)
            of_runs.append(outputs[len(outputs) - num_first :] + outputs[: len(outputs) - num_first])
    assert answers(of_runs[0]) == answers(of_runs[1])
    found = [[output.metrics.num_cached_tokens for output in outputs] for outputs in of_runs]
    assert found == [[0] * len(prompts), [12] * len(prompts)]


WAYS: list[dict[str, Any]] = [{"dtype": "float32"}]
if native_kernels() is not None:
    WAYS += [{"dtype": "bfloat16", "quantization": "int8"}]
    WAYS += pick([], [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float16", "quantization": "int4"}])


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_same_bytes_alone_and_in_a_batch(
    options: dict[str, Any], adapters: Adapters, checkpoint: GetCheckpoint
) -> None:
    prompts = [random_prompt(5 + number, seed=number) for number in range(len(adapters.requests))]
    with open_llm(checkpoint, "qwen3", **LORA, **options) as llm:
        together = answers(llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=adapters.requests))
    with open_llm(checkpoint, "qwen3", **LORA, **options, enable_prefix_caching=False) as llm:
        for prompt, request, expected in reversed(list(zip(prompts, adapters.requests, together, strict=True))):
            assert answers(llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=request)) == [expected]
    with open_llm(checkpoint, "qwen3", **options) as llm:  # the base model is what it is without adapters
        assert answers(llm.generate(prompts[-1], GREEDY, use_tqdm=False)) == together[-1:]
