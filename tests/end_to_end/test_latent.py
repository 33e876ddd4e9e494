"""Models whose attention keeps one vector of a token: same request, same bytes, in the memory of one vector."""

from functools import partial
from typing import Any

import pytest
from tests.breadth import pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers
from tests.end_to_end.test_drafts import sequences
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one

from octavo.config.args import EngineArgs
from octavo.engine import inproc_client
from octavo.engine.core import EngineCore
from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import native_kernels
from octavo.testing import KnownDrafter
from octavo.worker.worker import Worker

NAMES = pick(
    ["deepseek-v3", "deepseek-v2-groups-biases in bfloat16"],
    [
        f"{name}{dtype}"
        for name in ("deepseek-v2", "deepseek-v3", "deepseek-v3-yarn-halves", "glm4-moe-lite")
        for dtype in ("", " in bfloat16", " in float16")
    ],
)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if "in" in name.split() and native_kernels() is None:
        pytest.skip("without the C++ kernels, only float32 has the same bits in any batch")
    return name


@pytest.fixture(scope="module")
def alone(name: str, checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched", marks=pytest.mark.full),
        pytest.param({"block_size": 16, "max_num_batched_tokens": 30}, id="large blocks, chunked"),
        pytest.param(
            {"block_size": 32, "max_num_batched_tokens": 13}, id="larger blocks, chunked", marks=pytest.mark.full
        ),
        pytest.param({"num_kv_blocks": MAX_LEN // BLOCK_SIZE, "max_num_batched_tokens": 14}, id="preempted"),
    ],
)
def test_in_a_batch(name: str, options: dict[str, Any], alone: list[Any], make_llm: MakeLLM) -> None:
    llm = make_llm(name, **options)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(outputs) == alone
    assert ("num_kv_blocks" in options) == (sum(output.metrics.num_preemptions for output in outputs) > 0)
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(again) == alone
    assert sum(output.metrics.num_cached_tokens for output in again) > 0


def test_drafts_change_nothing(name: str, alone: list[Any], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    known = sequences(make_llm(name))
    drafter = KnownDrafter.of_sequences(known, vocab_size=max(map(max, known)) + 1)
    monkeypatch.setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))
    assert answers(make_llm(name).generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert drafter.num_proposed > 50


def test_a_token_takes_one_vector(checkpoint: GetCheckpoint) -> None:
    """26 elements of 4 bytes in each of three layers, where keys and values of six heads would take 180."""
    folder = str(checkpoint("deepseek-v3").folder)
    config = EngineArgs(model_name=folder, tokenizer="demo", dtype="float32", block_size=4, num_kv_blocks=64).resolve()
    assert Worker(config).kv_cache_spec.bytes_per_block == (3 * 4 * 26 * 4,)


@pytest.mark.skipif(native_kernels() is None, reason="int8 needs the C++ kernels")
def test_int8_is_refused(checkpoint: GetCheckpoint) -> None:
    with pytest.raises(InvalidParameterError, match="latent vectors are kept in bfloat16"):
        open_llm(checkpoint, "deepseek-v3 in bfloat16", kv_cache_dtype="int8")
