"""Adapters on ranks in real processes: they load beside the steps, on all ranks or on none."""

import pytest
from tests.executor.conftest import MakeExecutor
from tests.scheduler.adapters import adapter_of

from octavo.contracts.engine import AdapterRef, FinishedRequest
from octavo.errors import CheckpointError
from octavo.lora.host_cache import HostAdapters
from octavo.testing import expected_tokens, make_request, make_scheduler


def test_steps_go_on_while_an_adapter_loads_on_all_ranks(make_executor: MakeExecutor) -> None:
    executor = make_executor(tp=2)
    executor.start()
    store = HostAdapters(executor.call, capacity=2)
    scheduler = make_scheduler(num_blocks=16, adapters=store, num_adapter_slots=1)
    broken = AdapterRef(name="broken", path="", content_hash="ff", rank=1)
    requests = {
        name: make_request(name, [5, 6], adapter=adapter, max_tokens=20, ignore_eos=True)
        for name, adapter in (("base", None), ("tuned", adapter_of(0)), ("other", adapter_of(1)), ("broken", broken))
    }
    for request in requests.values():
        scheduler.add_request(request)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishedRequest] = {}
    companies: list[tuple[str, ...]] = []
    while not scheduler.is_finished():
        if scheduler.only_waits:
            store.wait(0.01)
        output = scheduler.schedule()
        update = scheduler.update_from_output(output, executor.execute_model(output).result())
        companies.append(tuple(update.req_ids))
        ends |= update.finished
        for name, token_id in zip(update.req_ids, update.new_token_ids, strict=True):
            tokens.setdefault(name, []).append(token_id)
    vocab_size = executor._config.model.vocab_size
    error = ends.pop("broken")
    assert (error.error_type, error.error) == ("CheckpointError", "rank 1: lora_A: of another model")
    assert ends.keys() == tokens.keys() == {"base", "tuned", "other"}
    assert tokens == {name: expected_tokens(requests[name], 128, vocab_size)[0] for name in tokens}
    assert companies[0] == ("base",)
    events = store.take_events()
    assert events is not None
    assert events.loads == {"adapter 0": 1, "adapter 1": 1}


def test_a_load_goes_on_while_ranks_are_called(make_executor: MakeExecutor) -> None:
    executor = make_executor(tp=2)
    executor.start()
    loading = executor.call("load_adapter", AdapterRef(name="broken", path="", content_hash="ff", rank=1), [])
    with pytest.raises(TimeoutError):
        loading.exception(0.0)
    executor.call("warmup").result()  # calls and their results are told apart from it
    assert isinstance(loading.exception(5.0), CheckpointError)
