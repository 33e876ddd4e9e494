"""A made-up family, by the recipe in CONTRIBUTING.

Windows in every third layer; the last layer has heads of another size, and its own table of angles, KV group and MLP.
"""

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import MakeLLM
from tests.end_to_end.support import answers, random_prompt

from octavo.config import families
from octavo.config.family import DECODER_NAMES, HEAD_NORM_NAMES, Family, Layers
from octavo.config.hf_layers import read_layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import DenseSpec, LayerSpec, RotarySpec
from octavo.sampling_params import SamplingParams

PROMPTS = [random_prompt(length, seed=length) for length in (3, 20, 11)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1, seed=1),
    SamplingParams(temperature=0.9, max_tokens=9, ignore_eos=True, seed=2),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, seed=3),
]


def read_odd_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    layers, [rotary] = read_layers(fields, family, max_position_embeddings)
    windows = [layer.with_attention(sliding_window=None if at % 3 else 8) for at, layer in enumerate(layers)]
    last = windows[-1].with_attention(head_dim=2 * rotary.width, num_kv_heads=1, rotary=1, entry_kind=1)
    other = LayerSpec(last.mixer, DenseSpec(intermediate_size=24))
    return (*windows[:-1], other), (rotary, RotarySpec(rope=rotary.rope, width=2 * rotary.width))


ODD = Family(
    name="Qwen3ForCausalLM",  # which the checkpoint says
    model_type="qwen3",
    weight_names={**DECODER_NAMES, **HEAD_NORM_NAMES},
    read_layers=read_odd_layers,
    head_norms="each",
)


@pytest.mark.parametrize("dtype", pick(["bfloat16"], ["float32", "bfloat16", "float16"]))
def test_same_bytes(dtype: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a batch with chunks, too little memory, and prefixes from the cache."""
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, ODD.name: ODD})
    options = {"dtype": dtype, "load_format": "dummy", "seed": 0}
    alone = make_llm("qwen3", **options)
    expected = [answers(alone.generate([p], s, use_tqdm=False))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    together = make_llm("qwen3", max_num_batched_tokens=12, num_kv_blocks=17, **options)
    for _ in range(2):
        assert answers(together.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
