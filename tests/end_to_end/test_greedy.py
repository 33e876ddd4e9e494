"""Greedy float32 output is transformers' output, token for token: every architecture, by every path."""

from typing import Any

import pytest
import torch
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM
from tests.end_to_end.support import random_prompt, random_tokens
from tests.models.tiny import TINY_MODELS, by_name
from torch.nn.utils.rnn import pad_sequence

from octavo.inputs import Prompt, TokensPrompt
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

# Mixed lengths, among them one token, exactly k blocks, one more and one less, and two that begin alike.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 19, 20, 21, 23, 24, 25, 28, 29, 31, 32, 33, 36, 40, 41, 43, 47]
PROMPTS: list[Prompt] = [random_prompt(length, seed=length) for length in LENGTHS]
PREFIX = random_tokens(46, seed=47)
PROMPTS += [{"prompt_token_ids": PREFIX[:length]} for length in (46, 44, 16, 8)]

PATHS: dict[str, dict[str, Any]] = {
    "without prefix caching": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 11},
    "one at a time": {"max_num_seqs": 1},
    "large blocks": {"block_size": 32},
}

NAMES = [case.name for case in TINY_MODELS]
# What an engine does with blocks depends on windows, and on nothing else that a layer computes. By default
# tests/models/test_exactness.py alone compares the logits of every architecture with those of transformers; states are
# for tests/end_to_end/test_hybrids.py.
_KEYED = [case for case in TINY_MODELS if not case.keeps_states]
_WINDOWS = [case for case in _KEYED if case.settings.get("sliding_window")]
SOME = [case.name for case in (*_KEYED[::12], *_WINDOWS[::3])]


def generated_by(reference: Any, prompt: TokensPrompt, num_tokens: int) -> list[int]:
    """Return what transformers' `generate` appends."""
    tokens = torch.tensor([prompt["prompt_token_ids"]])
    # A window of 1 is one that its sliding cache does not hold (it keeps the last 0 = all): compute without it.
    use_cache = getattr(reference.config, "sliding_window", None) != 1
    whole = reference.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=use_cache,
    )
    return [int(token) for token in whole[0, tokens.shape[1] :]]


def assert_greedy(reference: Any, outputs: list[RequestOutput]) -> None:
    """Check that each token is transformers' argmax after those before it: by induction, its greedy output.

    One forward for all, padded on the right, where a causal model does not look.
    """
    wholes = [torch.tensor(output.prompt_token_ids + output.outputs[0].token_ids) for output in outputs]
    with torch.inference_mode():
        logits = reference(pad_sequence(wholes, batch_first=True)).logits  # [R, T, V]
    for row, output in enumerate(outputs):
        end = len(wholes[row]) - 1
        assert output.outputs[0].token_ids == logits[row, end - NUM_TOKENS : end].argmax(-1).tolist()


@pytest.mark.parametrize("name", pick(SOME, NAMES))
def test_alone_and_in_a_batch_of_33_mixed_lengths(name: str, checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(name), random_prompt(21, seed=5)
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert_greedy(checkpoint(name).reference, [output])
    if RUNS_ALL or name in SOME[:3]:  # that the two are the same
        assert output.outputs[0].token_ids == generated_by(checkpoint(name).reference, prompt, NUM_TOKENS)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(outputs) == 33
    assert_greedy(checkpoint(name).reference, outputs)


@pytest.mark.parametrize("name", pick(SOME[::2], NAMES))
def test_preempted_and_found_in_the_cache(name: str, checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    """With memory for one full-length request, running ones keep pushing each other out; then the same prompts hit."""
    llm = make_llm(name, num_kv_blocks=MAX_LEN // BLOCK_SIZE, max_num_batched_tokens=16)
    outputs = llm.generate(PROMPTS[6:14], GREEDY, use_tqdm=False)
    keeps_states = by_name(name).keeps_states
    assert keeps_states or any(output.metrics.num_preemptions for output in outputs)
    assert_greedy(checkpoint(name).reference, outputs)
    for prompt, num_cached in (
        (random_prompt(13, seed=90), 12),
        (random_prompt(12, seed=91), 8),
    ):  # a part of block 4; exactly 3
        llm.generate(prompt, GREEDY, use_tqdm=False)
        [again] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert again.metrics.num_cached_tokens == (0 if keeps_states else num_cached)
        assert_greedy(checkpoint(name).reference, [again])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["llama", *pick([], ["mistral-window", "qwen2-yarn"]), "qwen3-mixed-windows"])
def test_every_path_gives_the_same(name: str, path: str, checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    outputs = make_llm(name, **PATHS[path]).generate(PROMPTS[::3], GREEDY, use_tqdm=False)
    assert_greedy(checkpoint(name).reference, outputs)
