"""When graphs are captured; the device double rejects the same ops as a real device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fakes.queued_device import NotCapturableError, RecordedQueue

from octavo.sampling.rows import ARGMAX
from octavo.worker.decode_graphs import MAX_GRAPHS, DecodeGraphs, GraphKey, GraphUses


def key(num_rows: int) -> GraphKey:
    return GraphKey(num_rows=num_rows, max_context=512, ending=ARGMAX)


def launching(what: Callable[[], object]) -> Callable[[], None]:
    """Return a step that launches this and has no result."""

    def step() -> None:
        what()

    return step


class Counter:
    """A step that adds its number of rows to a tensor."""

    def __init__(self) -> None:
        self.total = torch.zeros(1, dtype=torch.int64)
        self.num_prepared = 0

    def run(self, key: GraphKey) -> None:
        self.total.add_(key.num_rows)

    def prepare(self) -> None:
        self.num_prepared += 1


@pytest.fixture
def uses(tmp_path: Path) -> GraphUses:
    return GraphUses(tmp_path / "uses.json")


def test_a_graph_is_captured_at_its_second_use(uses: GraphUses) -> None:
    queue, counter = RecordedQueue(), Counter()
    graphs = DecodeGraphs(queue, counter.run, counter.prepare, uses)
    assert graphs.find(key(4)) is None
    assert graphs.find(key(8)) is None
    assert queue.captures == 0
    replay = graphs.find(key(4))
    assert replay is not None
    assert key(4) in graphs
    assert key(8) not in graphs
    assert (queue.captures, counter.num_prepared) == (1, 1)
    counter.total.zero_()
    replay()
    assert counter.total.item() == 4
    assert graphs.find(key(4)) is replay


def test_the_next_engine_captures_at_once_what_this_one_used(uses: GraphUses, tmp_path: Path) -> None:
    counter = Counter()
    for _ in range(2):
        DecodeGraphs(RecordedQueue(), counter.run, counter.prepare, uses).find(key(4))
    uses.save()
    queue = RecordedQueue()
    graphs = DecodeGraphs(queue, counter.run, counter.prepare, GraphUses(tmp_path / "uses.json"))
    graphs.capture_known()
    assert len(graphs) == queue.captures == 1
    assert graphs.find(key(4)) is not None


def test_there_is_a_most(uses: GraphUses) -> None:
    counter = Counter()
    graphs = DecodeGraphs(RecordedQueue(), counter.run, counter.prepare, uses)
    for num_rows in range(1, MAX_GRAPHS + 3):
        graphs.find(key(num_rows))
        found = graphs.find(key(num_rows))
        assert (found is None) == (num_rows > MAX_GRAPHS)
    assert len(graphs) == MAX_GRAPHS


def test_what_cannot_be_captured_is_said_once_and_left_alone(uses: GraphUses, caplog: pytest.LogCaptureFixture) -> None:
    values = torch.tensor([1, 0, 2])
    graphs = DecodeGraphs(RecordedQueue(), lambda key: launching(values.nonzero)(), lambda: None, uses)
    for _ in range(4):
        assert graphs.find(key(4)) is None
    assert caplog.text.count("computed op by op") == 1


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: float(x[0]),
    ],
)
def test_the_double_refuses_what_a_device_refuses(step: Callable[[torch.Tensor], object]) -> None:
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(NotCapturableError):
        RecordedQueue().capture(launching(lambda: step(x)))


def test_the_double_replays_launches_and_not_python() -> None:
    x, out, factor = torch.zeros(3), torch.zeros(3), [2.0]
    replay = RecordedQueue().capture(launching(lambda: out.copy_((x + 1.0).view(3, 1).mul(factor[0])[:, 0])))
    x.fill_(4.0)
    factor[0] = 100.0
    replay()
    assert out.tolist() == [10.0, 10.0, 10.0]
