"""A made-up family: its last layer has heads of another size, and its own table of angles, KV group and MLP."""

from dataclasses import replace

import msgspec
import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import MakeLLM
from tests.end_to_end.support import answers, random_prompt
from tests.models.recurrent import load_as

from octavo.config.layers import DenseSpec, LayerSpec, RotarySpec
from octavo.config.model import ModelConfig
from octavo.models.llama import Qwen3ForCausalLM
from octavo.sampling_params import SamplingParams

PROMPTS = [random_prompt(length, seed=length) for length in (3, 20, 11)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1, seed=1),
    SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=2),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, seed=3),
]


def with_another_last_layer(config: ModelConfig) -> ModelConfig:
    last = config.attention(config.num_layers - 1)
    other = msgspec.structs.replace(
        last, head_dim=2 * last.head_dim, num_kv_heads=1, rotary=1, sliding_window=None, entry_kind=1
    )
    return replace(
        config,
        layers=(*config.layers[:-1], LayerSpec(other, DenseSpec(intermediate_size=24))),
        rotary=(*config.rotary, RotarySpec(rope=config.rotary[0].rope, width=other.head_dim)),
    )


@pytest.mark.parametrize("dtype", pick(["bfloat16"], ["float32", "bfloat16", "float16"]))
def test_same_bytes(dtype: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a batch with chunks, too little memory, and prefixes from the cache."""
    load_as(monkeypatch, Qwen3ForCausalLM, with_another_last_layer)
    options = {"dtype": dtype, "load_format": "dummy", "seed": 0}
    alone = make_llm("qwen3", **options)
    expected = [answers(alone.generate([p], s, use_tqdm=False))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    together = make_llm("qwen3", max_num_batched_tokens=12, num_kv_blocks=17, **options)
    for _ in range(2):
        assert answers(together.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
