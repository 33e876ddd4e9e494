"""Hybrids as agents use them: long conversations, few states, tools; with drafts of every kind, and without.

A state cannot be cut back: what of a conversation must be computed again depends on where states were kept.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN
from tests.end_to_end.support import answers, random_prompt, random_tokens
from tests.end_to_end.test_mtp import ALWAYS, DTYPES, OFF, Open, opened  # noqa: F401 - a fixture
from tests.models.hybrid import INTERVAL, keep_states_often
from tests.models.mtp import make_mtp
from tests.models.tiny import TinyModel, by_name

from octavo.errors import InsufficientMemoryError, InvalidParameterError
from octavo.inputs import Prompt
from octavo.sampling_params import SamplingParams

LONG = 320  # tokens of a conversation
NGRAM = {"method": "ngram", "adaptive": False}
METHODS = {"nothing": OFF, "MTP": ALWAYS, "n-gram": NGRAM}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)


@pytest.fixture(scope="module", autouse=True)
def _states_are_kept_often() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_states_often(monkeypatch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    settings = {**by_name("qwen3-5").settings, "max_position_embeddings": LONG}
    make_mtp(TinyModel(name="long", family="Qwen3_5", settings=settings)).save(folder)
    return folder


@pytest.mark.parametrize("method", pick(["MTP"], list(METHODS)))
def test_a_turn_computes_its_new_tokens_and_less_than_an_interval(method: str, folder: Path, opened: Open) -> None:  # noqa: F811
    """Each turn behind all that was said before."""
    llm, said = opened(folder, speculative_config=METHODS[method], max_model_len=LONG), list[int]()
    for turn in range(pick(10, 20)):
        known = len(said)
        said += random_tokens(5, seed=turn)
        [output] = llm.generate({"prompt_token_ids": said}, GREEDY, use_tqdm=False)
        assert known - output.metrics.num_cached_tokens <= INTERVAL, f"turn {turn}"
        said += output.outputs[0].token_ids


@pytest.mark.parametrize("method", pick(["MTP"], list(METHODS)))
def test_more_requests_than_states(method: str, folder: Path, opened: Open) -> None:  # noqa: F811
    """Prompts that need as many states as there are blocks, 8: none dies, and none starves."""
    prompts: list[Prompt] = [random_prompt(40 + at % 16, seed=at) for at in range(pick(24, 64))]
    params = GREEDY.replace(max_tokens=4)
    expected = answers(opened(folder, speculative_config=OFF).generate(prompts, params, use_tqdm=False))
    few = {"block_size": 16, "num_kv_blocks": 8, "max_num_batched_tokens": 32, "max_num_seqs": 32}
    llm = opened(folder, speculative_config=METHODS[method], **few)
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected


def test_what_never_fits_is_refused_at_once(folder: Path, opened: Open) -> None:  # noqa: F811
    """One block below the pool is served; one above is an error of the call, a pool for no request one of the start."""
    num_blocks = MAX_LEN // BLOCK_SIZE
    llm = opened(folder, num_kv_blocks=num_blocks)
    below = random_prompt(MAX_LEN - BLOCK_SIZE, seed=1)
    [output] = llm.generate(below, GREEDY.replace(max_tokens=BLOCK_SIZE), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(InvalidParameterError, match=f"{MAX_LEN}"):
        llm.generate(random_prompt(MAX_LEN + BLOCK_SIZE, seed=1), GREEDY, use_tqdm=False)
    with pytest.raises(InsufficientMemoryError):
        opened(folder, num_kv_blocks=num_blocks - 1)


NEEDLES: list[tuple[str, bool]] = pick(
    [("MTP", True), ("n-gram", True)],
    [(method, is_cached) for method in METHODS for is_cached in (True, False)],
)


@pytest.mark.parametrize("dtype", pick(DTYPES[-1:], DTYPES))
def test_needles(dtype: str, folder: Path, opened: Open) -> None:  # noqa: F811
    """Questions about many tools: A, B, and A again, with every kind of drafts, with and without cache."""
    tools = random_tokens(30, seed=7)
    asked = [tools + random_tokens(4, seed=10 + at) for at in range(pick(2, 20))]
    turns = [tokens for at, a in enumerate(asked) for tokens in (a, asked[at - 1], a)]
    params = [GREEDY, GREEDY.replace(temperature=0.8)]
    llm = opened(folder, dtype=dtype, speculative_config=OFF, enable_prefix_caching=False)
    alone = {
        tuple(tokens): [answers(llm.generate({"prompt_token_ids": tokens}, each, use_tqdm=False)) for each in params]
        for tokens in asked
    }
    for method, is_cached in NEEDLES:
        llm = opened(folder, dtype=dtype, speculative_config=METHODS[method], enable_prefix_caching=is_cached)
        for tokens in turns:
            found = [answers(llm.generate({"prompt_token_ids": tokens}, each, use_tqdm=False)) for each in params]
            assert found == alone[tuple(tokens)], (method, is_cached)
