"""An image gives the same bits alone, in a batch, in chunks, after a preemption, from the cache, and on two ranks."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import GetCheckpoint
from tests.multimodal.conftest import OpenLLM
from tests.multimodal.tiny import MAX_LEN, PLACE, VISION_MODELS, picture
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import LLM, SamplingParams
from octavo.kernels.dispatch import native_kernels
from octavo.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=pick(6, 10), logprobs=2, ignore_eos=True)
SAME_TEXT = f"The same text {PLACE} around it. "
REQUESTS: list[dict[str, Any]] = [
    {"prompt": SAME_TEXT, "images": [picture(40, 30, 1)]},
    {"prompt": SAME_TEXT, "images": [picture(40, 30, 2)]},
    {"prompt": f"{PLACE}{PLACE}", "images": [picture(40, 30, 2), picture(9, 70, 3)]},
    {"prompt": "Only text, and more than a block of it."},
    {"prompt": f"No block is whole before {PLACE}", "images": [picture(60, 60, 4)]},
]


def answers(llm: LLM, requests: list[dict[str, Any]]) -> list[tuple[list[int], Any]]:
    outputs = llm.generate_multimodal(requests, PARAMS, use_tqdm=False)
    return [told(output) for output in outputs]


def told(output: RequestOutput) -> tuple[list[int], Any]:
    return list(output.outputs[0].token_ids), output.outputs[0].logprobs


NAMES = pick(["gemma3", "qwen3-vl"], [*VISION_MODELS])


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def requests_for(name: str) -> list[dict[str, Any]]:
    return [{**request, "prompt": VISION_MODELS[name].with_place(request["prompt"])} for request in REQUESTS]


def alone(open_llm: OpenLLM, name: str) -> list[tuple[list[int], Any]]:
    llm = open_llm(name, enable_prefix_caching=False)
    return [answer for request in requests_for(name) for answer in answers(llm, [request])]


def test_in_any_company(name: str, open_llm: OpenLLM) -> None:
    expected = alone(open_llm, name)
    assert len({str(answer) for answer in expected}) == len(expected)
    # Cuts inside images, each of which is larger; or, where a step must not do so, is as large as two steps.
    small = {"max_num_batched_tokens": 9, "max_num_seqs": 8}
    if name == "gemma3":
        small = {"max_num_batched_tokens": 12, "max_num_seqs": 4}
    ways: list[dict[str, Any]] = [
        {"num_kv_blocks": MAX_LEN // 4, "enable_prefix_caching": False},  # preempts
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "encoder_cache_tokens": 40},  # one image at a time
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram"}, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    ]
    turn = NAMES.index(name) % 2  # by default the other half of the ways is for the next model
    for options in ({}, small, *pick(ways[turn::2], ways)):
        assert answers(open_llm(name, **options), requests_for(name)) == expected, options


@pytest.mark.skipif(native_kernels() is None, reason="torch's bfloat16 is not batch-invariant")
def test_in_bfloat16(open_llm: OpenLLM) -> None:
    expected = alone(partial(open_llm, dtype="bfloat16"), "qwen2.5-vl")
    for options in ({}, {"max_num_batched_tokens": 9, "max_num_seqs": 8}):
        assert answers(open_llm("qwen2.5-vl", dtype="bfloat16", **options), REQUESTS) == expected, options


@pytest.mark.parametrize("name", pick(["qwen3-vl"], ["qwen3-vl", "gemma3"]))
def test_in_another_process_and_on_two_ranks(name: str, open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default on threads: a server of images, with a core of its own, is in tests/server/test_images.py."""
    if not RUNS_ALL:
        monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    requests = requests_for(name)
    expected = answers(open_llm(name), requests)
    by_ranks = answers(open_llm(name, engine_process=RUNS_ALL, tensor_parallel_size=2), requests)
    assert [tokens for tokens, _ in by_ranks] == [tokens for tokens, _ in expected]


def test_cached_equals_uncached_and_only_the_same_image_hits(open_llm: OpenLLM) -> None:
    llm = open_llm("qwen2-vl")
    first, again, other = (llm.generate_multimodal([REQUESTS[index]], PARAMS, use_tqdm=False)[0] for index in (0, 0, 1))
    assert told(again) == told(first) != told(other)
    cached = [output.metrics.num_cached_tokens for output in (first, again, other)]
    before_image = len("The same text ") + 1  # and the vision start
    assert cached == [0, (len(first.prompt_token_ids) - 1) // 4 * 4, before_image // 4 * 4]


def test_a_prefix_on_disk_is_one_images_own(
    seeing: GetCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    options: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": 4, "num_kv_blocks": 512}
    model = str(seeing("qwen2-vl").folder)
    with LLM(model, prefix_cache_disk=0.1, **options) as llm:
        first, other = llm.generate_multimodal(REQUESTS[:2], PARAMS, use_tqdm=False)
    with LLM(model, prefix_cache_disk=0.1, **options) as llm:
        found = llm.generate_multimodal(REQUESTS[1::-1], PARAMS, use_tqdm=False)
    assert [told(output) for output in found] == [told(other), told(first)]
    assert all(output.metrics.num_cached_tokens > 20 for output in found)


def test_mixed_requests_with_aborts_leave_nothing_behind(open_llm: OpenLLM) -> None:
    chance = random.Random(0)
    llm = open_llm("qwen2-vl", num_kv_blocks=80, max_num_batched_tokens=24, encoder_cache_tokens=64)
    engine, expected = llm.engine, {}
    for index, request in enumerate(REQUESTS):
        [expected[index]] = answers(llm, [request])
    started: dict[str, int] = {}
    finished: dict[str, RequestOutput] = {}
    for _ in range(pick(40, 200)):
        index = chance.randrange(len(REQUESTS))
        prompt = engine.front.inputs.multimodal.of_request(REQUESTS[index])
        started[engine.add_request(prompt, PARAMS)] = index
        for _ in range(chance.randrange(3)):
            finished |= {output.request_id: output for output in engine.step()[0] if output.finished}
        if chance.random() < 0.4:
            engine.abort_request(chance.choice(list(started)))
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step()[0] if output.finished}
    assert finished.keys() == started.keys()
    whole = {each: output for each, output in finished.items() if output.outputs[0].finish_reason == "length"}
    assert 10 < len(whole) < len(finished)
    assert all(told(output) == expected[started[each]] for each, output in whole.items())
    scheduler = engine.front.client._core.scheduler  # type: ignore[attr-defined]
    assert not scheduler._encoder.held_contents
    assert scheduler.blocks.num_free == [80]
