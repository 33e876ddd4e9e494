"""Hybrids of linear and full attention: same request, same bytes, by whatever path states come, drafts among them."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import MAX_LEN, DraftFrom, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt, random_tokens
from tests.end_to_end.test_drafts import sequences
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.models.hybrid import keep_states_often
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import ModelRunner
from octavo.config.args import EngineArgs
from octavo.errors import InsufficientMemoryError, UnsupportedModelError
from octavo.inputs import Prompt
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams

HYBRIDS = pick(
    ["qwen3-5"],
    [
        *("qwen3-5", "qwen3-next", "qwen3-5-moe", "qwen3-next-one-head", "lfm2", "lfm2-moe", "lfm3", "granite-hybrid"),
        *("granite-hybrid-dense", "nemotron-h", "nemotron-h-latent", "falcon-h1", "mamba2"),
    ],
)
DTYPES = ["float32"] if native_kernels() is None else pick(["bfloat16"], ["float32", "bfloat16", "float16"])


@pytest.fixture(scope="module", autouse=True)
def _states_are_kept_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_states_often(monkeypatch)
        yield


@pytest.fixture(scope="module", params=[f"{name} in {dtype}" for name in HYBRIDS for dtype in DTYPES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def known(name: str, checkpoint: GetCheckpoint) -> tuple[list[Any], list[list[int]]]:
    """The answers alone, and what all requests say, prompts included."""
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        return one_by_one(llm), sequences(llm)


@pytest.fixture
def alone(known: tuple[list[Any], list[list[int]]]) -> list[Any]:
    return known[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 14}, id="chunked", marks=pytest.mark.full),  # by default in stages
        pytest.param({"block_size": 16, "max_num_batched_tokens": 30}, id="large blocks, chunked"),
        pytest.param({"block_size": 1, "max_num_seqs": 3}, id="blocks of one token", marks=pytest.mark.full),
        pytest.param({"enforce_eager": True}, id="op by op"),
    ],
)
def test_in_a_batch(name: str, options: dict[str, Any], alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name, **options)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone  # with what is found of the first time


def test_preempted(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    has_states_alone = name.startswith("mamba2")  # of which requests need no more as they go on: others wait
    few = 7 if has_states_alone else MAX_LEN // 4
    llm = make_llm(name, num_kv_blocks=few, max_num_batched_tokens=14)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert has_states_alone or sum(output.metrics.num_preemptions for output in outputs) > pick(0, 2)
    assert answers(outputs) == alone


def test_in_stages(name: str, alone: list[Any], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in flight; of each group, most stages have no layer."""
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    llm = make_llm(name, pipeline_parallel_size=3, max_num_batched_tokens=14)
    for _ in range(2):
        assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


def test_on_two_ranks(name: str, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of sampling, alone; then together, from the cache, in chunks and preempted, with and without drafts."""
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    step = pick(2, 1)
    prompts, params = PROMPTS[::step], PARAMS[::step]
    expected = one_by_one(make_llm(name, tensor_parallel_size=2, enable_prefix_caching=False), step)
    llm = make_llm(name, tensor_parallel_size=2, num_kv_blocks=MAX_LEN // 4, max_num_batched_tokens=14)
    for _ in range(2):
        assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected
    llm = make_llm(name, tensor_parallel_size=2, speculative_config={"method": "ngram", "adaptive": False})
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        pytest.param({"max_num_batched_tokens": 18, "num_kv_blocks": MAX_LEN // 4}, id="chunked and preempted"),
        pytest.param({"enforce_eager": True, "block_size": 16}, id="op by op", marks=pytest.mark.full),
    ],
)
def test_drafts_leave_no_trace(
    name: str,
    known: tuple[list[Any], list[list[int]]],
    options: dict[str, Any],
    make_llm: MakeLLM,
    draft_from: DraftFrom,
) -> None:
    """Right, wrong and half-right ones; the second time, behind prefixes that requests with drafts have left."""
    expected, sequences = known
    drafter = draft_from(sequences)
    llm = make_llm(name, speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **options)
    for _ in range(2):
        assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert drafter.num_proposed > drafter.num_accepted > 10


def test_prompt_lookup(name: str, make_llm: MakeLLM) -> None:
    """A text that repeats itself: accepted drafts, and rejected ones, across the ends of blocks."""
    prompts: list[Prompt] = [{"prompt_token_ids": random_tokens(5, seed=seed) * 4} for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=1)
    expected = answers(make_llm(name).generate(prompts, params, use_tqdm=False))
    llm = make_llm(name, speculative_config={"method": "ngram", "adaptive": False})
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert answers(outputs) == expected
    assert sum(output.metrics.num_drafts for output in outputs) > 0


def test_a_prefix_is_found_up_to_the_last_state_that_was_kept(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name)
    prefix, params = random_tokens(30, seed=8), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for length, num_cached in ((30, 0), (30, 24), (17, 16), (16, 8), (8, 0)):
        [output] = llm.generate({"prompt_token_ids": prefix[:length]}, params, use_tqdm=False)
        assert output.metrics.num_cached_tokens == num_cached
    said = [*prefix[:30], *llm.generate({"prompt_token_ids": prefix}, params)[0].outputs[0].token_ids, 5]
    [output] = llm.generate({"prompt_token_ids": said}, params, use_tqdm=False)  # the next turn of a chat
    assert output.metrics.num_cached_tokens == 48


def test_siblings_that_arrive_together_begin_from_no_state_of_the_same_step(name: str, make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(name), random_prompt(20, seed=9)
    params = SamplingParams(n=3, max_tokens=8, ignore_eos=True, seed=1)
    [together] = llm.generate(prompt, params, use_tqdm=False)
    for sample in together.outputs:
        [single] = llm.generate(prompt, params.replace(n=1, seed=sample.seed), use_tqdm=False)
        assert single.outputs[0].token_ids == sample.token_ids


def test_requests_wait_for_states(name: str, make_llm: MakeLLM) -> None:
    """More requests than states: they wait or are preempted, none fails, and every answer is the same."""
    prompts = [random_prompt(20 + at % 20, seed=at) for at in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)
    expected = answers(make_llm(name).generate(prompts, params, use_tqdm=False))
    llm = make_llm(name, block_size=16, num_kv_blocks=6, max_num_batched_tokens=16, max_num_seqs=16)
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected


def test_handles_of_keys_and_values_are_refused(checkpoint: GetCheckpoint) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent state; use LLM"):
        ModelRunner(str(checkpoint("qwen3-5").folder), tokenizer="demo")


def test_states_are_counted(checkpoint: GetCheckpoint, make_llm: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    """A request holds at most as many states as a chunk has blocks, and two more."""
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    with caplog.at_level("INFO"):
        make_llm("qwen3-5", num_kv_blocks=None, **options)
    states = EngineArgs(model_name=str(checkpoint("qwen3-5").folder), tokenizer="demo").resolve().model.kv_groups
    peak = next(group for group in states if group.kind == "recurrent").peak_blocks(MAX_LEN, 4, 16)
    assert peak == 5
    assert f"{2 * 2 * peak} recurrent states, " in caplog.text
    with pytest.raises(InsufficientMemoryError, match=rf"{peak} recurrent states .* at most"):
        make_llm("qwen3-5", num_kv_blocks=peak - 1, **options)
