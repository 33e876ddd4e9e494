"""Random arrivals, aborts, priorities and parameters in little memory: whoever finishes, finishes as if alone."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import GetCheckpoint, open_llm
from tests.end_to_end.support import answer, random_tokens
from tests.models.tiny import VOCAB_SIZE

from octavo import LLM
from octavo.inputs import TokensPrompt
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestPriority, SamplingParams

NUM_REQUESTS = pick(20, 30)
STEMS = [random_tokens(40, seed=seed) for seed in range(3)]  # prompts that begin alike are common


def random_params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"seed": rng.getrandbits(64), "max_tokens": rng.randint(1, 16)}
    for name, values in (
        ("temperature", [0.0, 0.5, 1.0, 2.0]),
        ("top_k", [0, 3]),
        ("top_p", [1.0, 0.7]),
        ("n", [1, 1, 2]),
        ("repetition_penalty", [1.0, 1.2]),
        ("frequency_penalty", [0.0, 0.5]),
        ("stop", [(), ("a", "b"), ("1", "2")]),
        ("stop_token_ids", [(), tuple(rng.sample(range(VOCAB_SIZE), 4))]),
        ("ignore_eos", [True, False]),
        ("logprobs", [None, 2]),
        ("prompt_logprobs", [None, None, 1]),
    ):
        options[name] = rng.choice(values)
    options["min_tokens"] = rng.choice([0, options["max_tokens"] // 2])
    return SamplingParams.from_options(options)


def random_prompt(rng: random.Random) -> TokensPrompt:
    return {"prompt_token_ids": rng.choice(STEMS)[: rng.randint(1, 40)]}


def storm_requests(rng: random.Random) -> list[tuple[TokensPrompt, SamplingParams]]:
    return [(random_prompt(rng), random_params(rng)) for _ in range(NUM_REQUESTS)]


def step(llm: LLM, last: dict[str, RequestOutput]) -> None:
    last |= {output.request_id: output for output in llm.engine.step()[0]}


@pytest.mark.parametrize("seed", range(pick(1, 8)))
def test_whoever_finishes_finishes_as_if_alone(seed: int, checkpoint: GetCheckpoint) -> None:
    weather_storm(seed, checkpoint)


def weather_storm(
    seed: int, checkpoint: GetCheckpoint, prepare: Callable[[LLM], None] = lambda llm: None, **more_options: Any
) -> None:
    """Let a storm of requests loose on an engine with these options, and look at every answer.

    `prepare` gets the engine that answers each of them alone.
    """
    rng = random.Random(seed)
    requests = storm_requests(rng)
    with open_llm(checkpoint, "qwen3-mixed-windows", enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in requests]
        prepare(llm)

    ids: dict[str, int] = {}
    last: dict[str, RequestOutput] = {}
    options = {"num_kv_blocks": 20, "max_num_batched_tokens": rng.choice([9, 30, 200]), "priority_ageing_s": 0.05}
    with open_llm(checkpoint, "qwen3-mixed-windows", **{**options, **more_options}) as llm:
        for at, (prompt, params) in enumerate(requests):
            request_id = llm.engine.add_request(prompt, params, priority=rng.choice(list(RequestPriority)))
            ids[request_id] = at
            for _ in range(rng.choice([0, 0, 1, 4])):
                step(llm, last)
            if rng.random() < 0.2:
                llm.engine.abort_request(rng.choice(list(ids)))
            llm.engine.check_integrity()
        llm.engine.abort_request(request_id)  # it has just come: at least this one cannot have finished
        while llm.engine.has_unfinished_requests():
            step(llm, last)
        llm.engine.check_integrity()

    assert last.keys() == ids.keys()
    num_aborted = 0
    for request_id, at in ids.items():
        if any(sample.finish_reason == "abort" for sample in last[request_id].outputs):
            num_aborted += 1
            for sample, whole in zip(last[request_id].outputs, alone[at].outputs, strict=True):
                assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
        else:
            assert answer(last[request_id]) == answer(alone[at])
    assert 0 < num_aborted < NUM_REQUESTS / 2
