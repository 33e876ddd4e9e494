"""Models whose attention keeps one vector of a token: same request, same bytes, in the memory of one vector.

The layers are a test's own (`tests.models.latent`), alone, behind windows, and among recurrent ones.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.breadth import RUNS_ALL, pick
from tests.end_to_end.conftest import BLOCK_SIZE, MAX_LEN, GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers
from tests.end_to_end.test_drafts import sequences
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.models.latent import use_latent_layers

from octavo.config.args import EngineArgs
from octavo.engine import inproc_client
from octavo.engine.core import EngineCore
from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import native_kernels
from octavo.testing import KnownDrafter
from octavo.worker.worker import Worker

MIXED, AMONG_RECURRENT = ("qwen3-mixed-windows", ()), ("qwen3", (1,))
MIXES = pick([MIXED, AMONG_RECURRENT], [("qwen3", ()), MIXED, AMONG_RECURRENT])


@pytest.fixture(scope="module", params=MIXES, ids=str)
def mix(request: pytest.FixtureRequest) -> Iterator[tuple[str, tuple[int, ...]]]:
    name, recurrent_layers = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_latent_layers(monkeypatch, recurrent_layers)
        yield name, recurrent_layers


@pytest.fixture(scope="module")
def alone(mix: tuple[str, tuple[int, ...]], checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, mix[0], enable_prefix_caching=False) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"block_size": 16, "max_num_batched_tokens": 30}, id="large blocks, chunked"),
        pytest.param({"num_kv_blocks": MAX_LEN // BLOCK_SIZE, "max_num_batched_tokens": 14}, id="preempted"),
    ],
)
def test_in_a_batch(
    mix: tuple[str, tuple[int, ...]], options: dict[str, Any], alone: list[Any], make_llm: MakeLLM
) -> None:
    if not RUNS_ALL and ("num_kv_blocks" if mix == AMONG_RECURRENT else "block_size") in options:
        pytest.skip("by default with the other layers")
    llm = make_llm(mix[0], **options)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(outputs) == alone
    assert ("num_kv_blocks" in options) == (sum(output.metrics.num_preemptions for output in outputs) > 0)
    again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert answers(again) == alone
    assert sum(output.metrics.num_cached_tokens for output in again) > 0


def test_drafts_change_nothing(
    mix: tuple[str, tuple[int, ...]], alone: list[Any], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, recurrent_layers = mix
    if recurrent_layers:
        pytest.skip("these recurrent layers log no drafts: test_hybrids.py")
    known = sequences(make_llm(name))
    drafter = KnownDrafter.of_sequences(known, vocab_size=max(map(max, known)) + 1)
    monkeypatch.setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))
    assert answers(make_llm(name).generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert drafter.num_proposed > 50


def test_a_token_takes_one_vector(mix: tuple[str, tuple[int, ...]], checkpoint: GetCheckpoint) -> None:
    """20 elements of 4 bytes in each layer that attends, where keys and values of two heads would take 40."""
    folder = str(checkpoint(mix[0]).folder)
    config = EngineArgs(model_name=folder, tokenizer="demo", dtype="float32", block_size=4, num_kv_blocks=64).resolve()
    spec = Worker(config).kv_cache_spec
    for group, num_bytes in zip(spec.groups, spec.bytes_per_block, strict=True):
        if group.group.kind == "latent":
            assert num_bytes == len(group.layers) * 4 * 20 * 4
    assert sum(len(group.layers) for group in spec.groups if group.group.kind == "latent") == 3 - len(mix[1])


@pytest.mark.skipif(native_kernels() is None, reason="int8 needs the C++ kernels")
def test_int8_is_refused(mix: tuple[str, tuple[int, ...]], checkpoint: GetCheckpoint) -> None:
    with pytest.raises(InvalidParameterError, match="latent vectors are kept in bfloat16"):
        open_llm(checkpoint, f"{mix[0]} in bfloat16", kv_cache_dtype="int8")
