"""Weights in integers through a whole engine: the same bytes by every path, little lost, and refusals in words."""

from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt
from tests.kernels.levels import LEVELS

from octavo.errors import InvalidParameterError
from octavo.inputs import Prompt
from octavo.sampling_params import SamplingParams

NUM_TOKENS = 10
PROMPTS: list[Prompt] = [random_prompt(length, seed=length) for length in (1, 3, 8, 13, 21, 33)]
PARAMS = [
    SamplingParams(seed=at, temperature=at % 2 * 0.8, max_tokens=NUM_TOKENS, logprobs=3, ignore_eos=True)
    for at in range(len(PROMPTS))
]
CHAT = "What is 12 + 30?"

needs_kernels = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")


@pytest.fixture(scope="module", params=["qwen3", "qwen2-moe", *pick([], ["demo", "llama"])])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[("bfloat16", "int8"), ("float16", "int4")], ids="-".join)
def in_integers(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(zip(("dtype", "quantization"), request.param, strict=True))


@pytest.fixture(scope="module")
def alone(name: str, in_integers: dict[str, Any], checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, name, enable_prefix_caching=False, **in_integers) as llm:
        return [
            answers(llm.generate(prompt, params, use_tqdm=False))[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 14}, id="chunked", marks=pytest.mark.full),
        pytest.param({"num_kv_blocks": 17}, id="preempted", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 14, "num_kv_blocks": 17}, id="chunked and preempted"),
    ],
)
def test_same_bytes(
    name: str, options: dict[str, Any], in_integers: dict[str, Any], alone: list[Any], make_llm: MakeLLM
) -> None:
    together = make_llm(name, **in_integers, **options)
    assert answers(together.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert answers(together.generate(PROMPTS[::-1], PARAMS[::-1], use_tqdm=False)) == alone[::-1]  # cached, too


@needs_kernels
def test_the_demo_model_still_knows_its_sums(in_integers: dict[str, Any], make_llm: MakeLLM) -> None:
    llm = make_llm("demo", **in_integers, max_model_len=256)
    [output] = llm.chat([{"role": "user", "content": CHAT}], SamplingParams(temperature=0.0, max_tokens=24))
    assert "42" in output.outputs[0].text


@needs_kernels
def test_quantization_changes_the_numbers(make_llm: MakeLLM) -> None:
    """Otherwise the tests above would say nothing."""
    found = [
        answers(make_llm("qwen3", dtype="bfloat16", quantization=name).generate(PROMPTS, PARAMS, use_tqdm=False))
        for name in (None, "int8", "int4")
    ]
    assert found[0] != found[1] != found[2] != found[0]


def test_what_cannot_be_computed_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(
        InvalidParameterError, match=r"quantization='int8': needs a CPU, 16-bit activations, .* with float32"
    ):
        make_llm("qwen3", dtype="float32", quantization="int8")
    with pytest.raises(InvalidParameterError, match="quantization='int3': one of int8, int4, fp8"):
        make_llm("qwen3", quantization="int3")
