"""An engine whose text side is real (the demo model's tokenizer) and whose model is a pure function without torch."""

from collections.abc import Callable, Iterator

import pytest

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import SchedulerOutput
from octavo.engine.llm_engine import LLMEngine
from octavo.testing import FakeExecutor

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def fake_executors(monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    """Let every engine made in this test run on a `FakeExecutor`; they are listed here as they are made."""
    made: list[FakeExecutor] = []

    def make(config: EngineConfig) -> FakeExecutor:
        cache = config.cache
        made.append(
            FakeExecutor(
                num_blocks=cache.num_kv_blocks or 512,
                block_size=cache.block_size,
                vocab_size=config.model.vocab_size,
                fails=lambda scheduler_output: any(should_fail(scheduler_output) for should_fail in FAILURES),
            )
        )
        return made[-1]

    monkeypatch.setattr("octavo.engine.inproc_client.make_executor", make)
    FAILURES.clear()
    return made


FAILURES: list[Callable[[SchedulerOutput], bool]] = []  # what the next steps should stumble over


@pytest.fixture
def make_engine(fake_executors: list[FakeExecutor]) -> Iterator[MakeEngine]:
    """Build engines by their options; all are closed at the end, none with a block lost."""
    made: list[LLMEngine] = []

    def make(model: str = "demo", **options: object) -> LLMEngine:
        made.append(LLMEngine(model, **{"block_size": 4, **options}))
        return made[-1]

    yield make
    for engine, executor in zip(made, fake_executors, strict=True):
        if not executor.has_exited:
            engine.check_integrity()
            engine.exit()


@pytest.fixture
def engine(make_engine: MakeEngine) -> LLMEngine:
    return make_engine()
