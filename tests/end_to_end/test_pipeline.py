"""A model in stages gives the bytes of the whole model, whatever happens while several steps are in flight.

Ranks are threads here, which leaves nothing out but processes: those are in tests/executor.
"""

from typing import Any

import pytest
from tests.end_to_end.conftest import GetCheckpoint, MakeLLM, open_llm
from tests.end_to_end.support import answers
from tests.end_to_end.test_greedy import GREEDY, assert_greedy
from tests.end_to_end.test_greedy import PROMPTS as GREEDY_PROMPTS
from tests.end_to_end.test_same_bytes import PARAMS, PROMPTS, one_by_one
from tests.models.tiny import TINY_MODELS
from tests.worker.threaded_ranks import ThreadedRanks

from octavo.config.engine import EngineConfig
from octavo.kernels.native import native_kernels

MODELS = ["llama", "qwen3-tied-gqa-8", "qwen3-mixed-windows", "demo"]
if native_kernels() is not None:
    MODELS.append("demo in bfloat16")


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[ThreadedRanks]:
    """Let engines of several stages run on threads; they are listed here as they are made."""
    from octavo.executor import base

    made: list[ThreadedRanks] = []
    make_executor = base.make_executor

    def make(config: EngineConfig) -> Any:
        if config.parallel.world_size == 1:
            return make_executor(config)
        made.append(ThreadedRanks(config))
        return made[-1]

    monkeypatch.setattr(base, "make_executor", make)
    return made


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(name: str, checkpoint: GetCheckpoint) -> list[Any]:
    with open_llm(checkpoint, name, enable_prefix_caching=False) as llm:
        return one_by_one(llm)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_batched_tokens": 14}, id="chunked"),
        pytest.param({"num_kv_blocks": 24}, id="preempted"),
    ],
)
def test_stages_give_the_bytes_of_one_rank(
    name: str, num_stages: int, options: dict[str, Any], alone: list[Any], make_llm: MakeLLM, ranks: list[ThreadedRanks]
) -> None:
    llm = make_llm(name, pipeline_parallel_size=num_stages, **options)
    for _ in range(2):  # the second time, prefixes are in the cache
        assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert ranks[0].num_most_in_flight == num_stages


@pytest.mark.parametrize("name", [case.name for case in TINY_MODELS])
def test_greedy_is_that_of_transformers(name: str, checkpoint: GetCheckpoint, make_llm: MakeLLM) -> None:
    llm = make_llm(name, pipeline_parallel_size=3)
    assert_greedy(checkpoint(name).reference, llm.generate(GREEDY_PROMPTS, GREEDY, use_tqdm=False))
