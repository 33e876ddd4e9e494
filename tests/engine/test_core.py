"""What an engine core does between steps."""

from octavo.config.args import EngineArgs
from octavo.engine.core import EngineCore
from octavo.testing import FakeExecutor, FakeWorker, make_request


class PagingWorker(FakeWorker):
    """Has two pages to prefault for each block that is reached; writes down every call."""

    def __init__(self) -> None:
        super().__init__(num_blocks=[64], block_size=4, vocab_size=1000)
        self.calls: list[int] = []
        self.num_pages = 0

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        self.calls.append(num_reached_blocks[0])
        if self.num_pages >= 2 * num_reached_blocks[0]:
            return False
        self.num_pages += 1
        return True


def test_ranks_with_memory_enough_are_asked_again_only_when_more_blocks_are_in_use() -> None:
    executor, worker = FakeExecutor(), PagingWorker()
    executor.worker = worker
    core = EngineCore(EngineArgs.from_options({"block_size": 4, "num_kv_blocks": 64}).resolve(), executor)

    def prepare() -> int:
        before = len(worker.calls)
        while core.prepare():
            pass
        assert not core.prepare()
        return len(worker.calls) - before

    def answer(name: str, num_tokens: int) -> None:
        core.add_request(make_request(name, range(1, num_tokens + 1), max_tokens=2, ignore_eos=True))
        while core.has_work():
            core.step()

    assert prepare() == 1
    assert prepare() == 0
    answer("a", 10)  # 3 blocks
    assert prepare() == 2 * 3 + 1
    assert worker.calls[-1] == 3
    answer("b", 2)  # further on
    assert prepare() > 1
    assert prepare() == 0
    core.close()
