"""Same request, same bytes: tokens, text, logprobs and seeds do not show by which path they were computed.

In float32 everywhere; in bfloat16 and float16 by the C++ kernels.
"""

from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt, random_tokens

from octavo import LLM, AsyncLLM
from octavo.inputs import Prompt
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import RequestPriority, SamplingParams

MODELS = ["qwen3-mixed-windows"]
MODELS += pick([], ["gpt-oss", "qwen2-moe-windows", "mistral-window", "llama", "qwen2-yarn", "mixtral", "demo"])
if native_kernels() is not None:
    MODELS += ["qwen2-moe in bfloat16", *pick([], ["qwen3-mixed-windows in float16", "demo in bfloat16"])]
    MODELS += ["gemma4-shared in bfloat16", *pick([], ["gemma4-experts in bfloat16", "gemma4-shared in float16"])]
    MODELS += pick([], ["gpt-oss in bfloat16", "qwen3-mixed-windows in bfloat16", "mistral-window in bfloat16"])
    MODELS += pick([], ["qwen2-moe in float16", "demo in float16"])
NUM_TOKENS = pick(9, 12)
PREFIX = random_tokens(24, seed=0)  # exactly 6 blocks

PROMPTS: list[Prompt] = [random_prompt(length, seed=length) for length in (1, 3, 4, 8, 13, 16, 21, 33)]
PROMPTS += [{"prompt_token_ids": PREFIX[:length]} for length in (24, 23, 20, 9)]

# Every way of sampling, each with logprobs; one for each prompt.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 1.8, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {5: 3.0, 9: -3.0}, "top_k": 20, "top_p": 0.8},
    {"allowed_token_ids": list(range(10, 60))},
    {"n": 3},
    {"min_tokens": NUM_TOKENS - 3, "stop_token_ids": list(range(20, 40))},
    {"bad_words": ["a", "the"], "temperature": 3.0},
]
PARAMS = [
    SamplingParams.from_options(
        {"seed": 1000 + at, "max_tokens": NUM_TOKENS, "logprobs": 3, "ignore_eos": True, **options}
    )
    for at, options in enumerate(OPTIONS)
]


def one_by_one(llm: LLM, step: int = 1) -> list[Any]:
    """Return the answers of every request alone, or of some: what all other paths must give."""
    return [
        answers(llm.generate(prompt, params, use_tqdm=False))[0]
        for prompt, params in zip(PROMPTS[::step], PARAMS[::step], strict=True)
    ]


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(name: str, checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),  # as in another order, below
        pytest.param({"max_num_seqs": 3}, id="three at a time", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 14}, id="chunked", marks=pytest.mark.full),
        pytest.param({"block_size": 16, "max_num_batched_tokens": 30, "max_num_seqs": 5}, id="large blocks, chunked"),
        pytest.param(
            {"block_size": 1, "enable_prefix_caching": False}, id="blocks of one token", marks=pytest.mark.full
        ),
    ],
)
def test_in_a_batch(name: str, options: dict[str, Any], alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name, **options)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


def test_in_another_order_and_company(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name)
    strangers: list[Prompt] = [random_prompt(length, seed=length) for length in (40, 2, 17)]
    params = [*[SamplingParams(max_tokens=20, ignore_eos=True)] * 3, *PARAMS[::-1]]
    assert answers(llm.generate(strangers + PROMPTS[::-1], params, use_tqdm=False))[3:] == alone[::-1]


def test_found_in_the_cache(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output in again:
        # The last token is always computed: its logits are needed.
        most = (len(output.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert output.metrics.num_cached_tokens == most
    assert answers(again) == alone


def test_preempted(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    chunks = pick({"max_num_batched_tokens": 14}, {})  # in one go by default
    llm = make_llm(name, num_kv_blocks=MAX_LEN // BLOCK_SIZE, **chunks)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > pick(0, 3)
    assert answers(outputs) == alone


def test_arriving_while_others_run(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    """One request more after every second step, urgent ones among them."""
    llm, expected, seen = make_llm(name, num_kv_blocks=24), {}, {}
    for at, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        priority = list(RequestPriority)[at % 5]
        expected[llm.engine.add_request(prompt, params, priority=priority)] = alone[at]
        for _ in range(2):
            seen.update({output.request_id: output for output in llm.engine.step()[0]})
    while llm.engine.has_unfinished_requests():
        seen.update({output.request_id: output for output in llm.engine.step()[0]})
    assert {request_id: answers([output])[0] for request_id, output in seen.items()} == expected


def test_where_nobody_sees_the_logits(name: str, make_llm: MakeLLM) -> None:
    """A step whose rows are all greedy, without logprobs, asks for the largest logits alone."""
    llm, greedy = make_llm(name), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    unseen = llm.generate(PROMPTS, greedy, use_tqdm=False)
    seen = llm.generate(PROMPTS, greedy.replace(logprobs=1), use_tqdm=False)
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (unseen, seen)]
    assert tokens[0] == tokens[1]


def test_on_two_threads(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name)
    torch.set_num_threads(2)
    try:
        assert answers(llm.generate(PROMPTS[::6], PARAMS[::6], use_tqdm=False)) == alone[::6]
    finally:
        torch.set_num_threads(1)


@pytest.mark.full  # by default tests/engine/test_data_parallel.py compares with cores in processes
async def test_in_a_process_of_its_own(checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    alone = one_by_one(make_llm("llama", enable_prefix_caching=False))
    folder = str(checkpoint("llama").folder)
    options: dict[str, Any] = {"tokenizer": "demo", "dtype": "float32", "max_model_len": MAX_LEN, "num_kv_blocks": 64}
    async with AsyncLLM(folder, **options, engine_process=True) as llm:
        outputs = await llm.generate(PROMPTS, PARAMS)
    assert answers(outputs) == alone


def test_a_sibling_is_reproduced_alone_by_its_own_seed(make_llm: MakeLLM) -> None:
    llm = make_llm("qwen3")
    params = SamplingParams(n=4, max_tokens=NUM_TOKENS, ignore_eos=True)
    [output] = llm.generate(PROMPTS[6], params, use_tqdm=False)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    for sample in output.outputs:
        [single] = llm.generate(PROMPTS[6], params.replace(n=1, seed=sample.seed), use_tqdm=False)
        assert single.outputs[0].token_ids == sample.token_ids


def test_siblings_share_the_prompts_blocks(make_llm: MakeLLM) -> None:
    """8 siblings of a 24-token prompt fit where 8 strangers of that length would not."""
    llm = make_llm("llama", num_kv_blocks=26)
    params = SamplingParams(n=8, max_tokens=8, ignore_eos=True, seed=1)
    [output] = llm.generate({"prompt_token_ids": [*PREFIX, 5]}, params, use_tqdm=False)
    assert output.metrics.num_preemptions == 0
    assert len(output.outputs) == 8
