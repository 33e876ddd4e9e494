"""A model with a sliding window keeps the window of a request, not its context: measured in blocks and in bytes.

What it says is the same as without any freeing: see `test_long_contexts`, `test_same_bytes`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.end_to_end.support import random_tokens
from tests.models.tiny import TinyModel

from octavo import LLM
from octavo.errors import InsufficientMemoryError
from octavo.sampling_params import SamplingParams

WINDOW, CHUNK, CONTEXT = 256, 128, 4096
NUM_TOKENS = 40
PEAK = (WINDOW + 64 + CHUNK + 8) // 16 + 2  # blocks of 16 tokens: 480 tokens' worth


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("window")
    settings = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    return folder, TinyModel(name="window", family="Mistral", settings=settings).save(folder)


def load(saved: tuple[Path, Any], num_kv_blocks: int, **options: Any) -> LLM:
    return LLM(
        str(saved[0]),
        tokenizer="demo",
        dtype="float32",
        block_size=16,
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=4,
        **options,
    )


def test_a_long_context_is_served_in_a_window_and_a_chunk(saved: tuple[Path, Any]) -> None:
    """30 blocks, 480 tokens, where the whole context takes 256 blocks; and the tokens are right."""
    assert PEAK == 30
    prompt = random_tokens(CONTEXT - NUM_TOKENS, seed=5)
    with load(saved, PEAK) as llm:
        [output] = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        llm.engine.check_integrity()
    [answer] = output.outputs
    assert output.metrics.num_preemptions == 0
    seen = [*prompt, *answer.token_ids][-3 * WINDOW - NUM_TOKENS :]  # what three layers of windows can see
    with torch.inference_mode():
        positions = torch.arange(CONTEXT - len(seen), CONTEXT).unsqueeze(0)
        logits = saved[1](torch.tensor([seen]), position_ids=positions).logits[0]  # [T, V]
    assert answer.token_ids == logits[-NUM_TOKENS - 1 : -1].argmax(-1).tolist()


def test_less_is_refused_with_the_way_out(saved: tuple[Path, Any]) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"needs 30 blocks of 16 tokens.* max_model_len to at most 464"):
        load(saved, PEAK - 1)


def test_prefixes_are_found_whose_last_window_is_left(saved: tuple[Path, Any]) -> None:
    prompt, params = random_tokens(1000, seed=6), SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2)
    with load(saved, 400) as llm:
        outputs = [llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0] for _ in range(2)]
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 992]
    first, again = (output.outputs[0] for output in outputs)
    assert (first.token_ids, first.cumulative_logprob) == (again.token_ids, again.cumulative_logprob)
