"""Models with recurrent layers: same request, same bytes, by whatever path the states come.

The layers are a test's own (`tests.models.recurrent`), alone or among layers that attend.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers, random_prompt, random_tokens
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.models.recurrent import use_recurrent_layers
from tests.worker.threaded_ranks import ThreadedRanks

from octavo import ModelRunner
from octavo.config.args import EngineArgs
from octavo.errors import InsufficientMemoryError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.sampling_params import SamplingParams

MIXES = pick([(0, 1, 2), (0, 2)], [(0, 1, 2), (0, 2), (1,)])
DTYPES = ["float32"] if native_kernels() is None else pick(["bfloat16"], ["float32", "bfloat16"])


@pytest.fixture(scope="module", params=MIXES, ids=str)
def layers(request: pytest.FixtureRequest) -> Iterator[tuple[int, ...]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_recurrent_layers(monkeypatch, request.param)
        yield request.param


@pytest.fixture(scope="module", params=DTYPES)
def name(request: pytest.FixtureRequest) -> str:
    return f"qwen3 in {request.param}"


@pytest.fixture(scope="module")
def alone(layers: tuple[int, ...], name: str, checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 14}, id="chunked", marks=pytest.mark.full),  # by default in stages
        pytest.param({"block_size": 16, "max_num_batched_tokens": 30}, id="large blocks, chunked"),
        pytest.param({"block_size": 1, "max_num_seqs": 3}, id="blocks of one token"),
    ],
)
def test_in_a_batch(
    name: str, layers: tuple[int, ...], options: dict[str, Any], alone: list[Any], make_llm: MakeLLM
) -> None:
    if not RUNS_ALL and options.get("block_size") == (16 if len(layers) == 3 else 1):
        pytest.skip("by default with the other layers")
    llm = make_llm(name, **options)
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone  # with what is found of the first time


def test_preempted(name: str, alone: list[Any], make_llm: MakeLLM, layers: tuple[int, ...]) -> None:
    """States alone preempt nobody: a request holds one, and one more for a moment, which admission leaves free."""
    is_pure = len(layers) == 3
    llm = make_llm(name, num_kv_blocks=5 if is_pure else MAX_LEN // 4, max_num_batched_tokens=14)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert num_preemptions == 0 if is_pure else num_preemptions > pick(0, 3)
    assert answers(outputs) == alone


def test_in_stages(
    name: str, layers: tuple[int, ...], alone: list[Any], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps in flight; of each group, most stages have no layer."""
    if len(layers) == 3 and not RUNS_ALL:
        pytest.skip("by default with layers of both kinds")
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    llm = make_llm(name, pipeline_parallel_size=3, max_num_batched_tokens=14)
    for _ in range(2):
        assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone


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


def test_drafts_are_refused(name: str, alone: list[Any], make_llm: MakeLLM) -> None:
    with pytest.raises(UnsupportedModelError, match="with NgramDrafter: a recurrent state cannot roll back rejected"):
        make_llm(name, speculative_config={"method": "ngram"})


def test_shards_are_refused(name: str, alone: list[Any], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", ThreadedRanks)
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel_size=2: .* not sharded"):
        make_llm(name, tensor_parallel_size=2)


def test_handles_of_keys_and_values_are_refused(layers: tuple[int, ...], checkpoint: GetCheckpoint) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent state; use LLM"):
        ModelRunner(str(checkpoint("qwen3").folder), tokenizer="demo")


def test_states_are_counted(
    layers: tuple[int, ...], checkpoint: GetCheckpoint, make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A request holds at most as many states as a chunk has blocks, and two more."""
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    with caplog.at_level("INFO"):
        make_llm("qwen3", num_kv_blocks=None, **options)
    states = EngineArgs(model_name=str(checkpoint("qwen3").folder), tokenizer="demo").resolve().model.kv_groups
    peak = next(group for group in states if group.kind == "recurrent").peak_blocks(MAX_LEN, 4, 16)
    assert peak == 5
    assert f"{2 * 2 * peak} recurrent states, " in caplog.text
    with pytest.raises(InsufficientMemoryError, match=rf"{peak} recurrent states .* at most"):
        make_llm("qwen3", num_kv_blocks=peak - 1, **options)
