"""Contexts of several attention tiles: transformers' tokens, and the same bytes by every path (float32).

Lengths lie at, below and above multiples of 32 and 64; one model's sliding window begins inside a tile.
"""

from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.support import answers, random_prompt, random_tokens
from tests.models.tiny import TinyModel

from octavo import LLM
from octavo.inputs import Prompt
from octavo.sampling_params import SamplingParams

MAX_LEN = 320
LENGTHS = [31, 32, 63, 64, 65, 100, 128, 129, 190, 255, 300]
PROMPTS: list[Prompt] = [random_prompt(length, seed=length) for length in LENGTHS]
SAMPLED = [
    SamplingParams(seed=at, temperature=1.2, top_p=0.95, max_tokens=12, ignore_eos=True, logprobs=2)
    for at in range(len(LENGTHS))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "full attention": {"family": "Qwen3"},
    "sliding window": {"family": "Mistral", "settings": {"sliding_window": 75}},
    "full and sliding": {
        "family": "Qwen3",
        "settings": {
            "use_sliding_window": True,
            "sliding_window": 75,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    },
}


@pytest.fixture(scope="module", params=pick(["full and sliding"], MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Return a checkpoint's folder and transformers' model of it."""
    options = MODELS[request.param]
    settings = {**options.get("settings", {}), "max_position_embeddings": MAX_LEN}
    folder = tmp_path_factory.mktemp("long")
    model = TinyModel(name="long", family=options["family"], settings=settings).save(folder)
    return str(folder), model


def load(saved: tuple[str, Any], **options: Any) -> LLM:
    defaults = {"tokenizer": "demo", "dtype": "float32", "block_size": 16, "num_kv_blocks": 400}
    return LLM(saved[0], **{**defaults, **options})


@pytest.fixture(scope="module")
def alone(saved: tuple[str, Any]) -> list[Any]:
    with load(saved, enable_prefix_caching=False) as llm:
        outputs = [
            llm.generate(prompt, params, use_tqdm=False) for prompt, params in zip(PROMPTS, SAMPLED, strict=True)
        ]
    return [answers(output)[0] for output in outputs]


@pytest.mark.parametrize("max_num_batched_tokens", pick([37], [2048, 37]))
def test_greedy_is_transformers(saved: tuple[str, Any], max_num_batched_tokens: int) -> None:
    with load(saved, max_num_batched_tokens=max_num_batched_tokens) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = saved[1](torch.tensor([output.prompt_token_ids + tokens])).logits[0]  # [T, V]
        assert tokens == logits[-len(tokens) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 41}, id="chunked", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 100, "block_size": 1, "num_kv_blocks": 4000}, id="blocks of one token"),
        pytest.param({"block_size": 64, "max_num_seqs": 2}, id="blocks of a tile"),
    ],
)
def test_same_bytes(saved: tuple[str, Any], alone: list[Any], options: dict[str, Any]) -> None:
    with load(saved, **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
        llm.engine.check_integrity()
    assert answers(outputs) == alone


def test_preempted(saved: tuple[str, Any], alone: list[Any]) -> None:
    """The first four take 96 of 104 blocks and want 24 more."""
    with load(saved, max_model_len=208, block_size=2, num_kv_blocks=104) as llm:
        outputs = llm.generate(PROMPTS[:9], SAMPLED[:9], use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in outputs)
    assert answers(outputs) == alone[:9]


def test_a_prefix_of_any_length_found_in_the_cache(saved: tuple[str, Any]) -> None:
    whole = random_tokens(270, seed=1)
    for num_shared in pick((16, 80, 250), (16, 64, 80, 128, 250)):
        prompt: Prompt = {"prompt_token_ids": [*whole[:num_shared], *random_tokens(20, seed=num_shared)]}
        with load(saved) as llm:
            [fresh] = llm.generate(prompt, SAMPLED[0], use_tqdm=False)
        with load(saved) as llm:
            llm.generate({"prompt_token_ids": whole}, GREEDY, use_tqdm=False)
            [cached] = llm.generate(prompt, SAMPLED[0], use_tqdm=False)
        assert cached.metrics.num_cached_tokens == num_shared // 16 * 16
        assert answers([cached]) == answers([fresh])
