"""Captured graphs and two steps in flight: the same outputs as op by op and one step at a time, in any combination.

The device is a double that records ops (`fakes.queued_device`); kernels are torch's, in float32, and batch-invariant.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.support import random_prompt
from tests.fakes.queued_device import RecordedQueue
from tests.models.hybrid import keep_states_often
from tests.models.tiny import TinyModel, by_name
from tests.worker.conftest import Place
from tests.worker.fixed_attention import FixedAttention

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.config.args import EngineArgs
from octavo.contracts.engine import FinishedRequest
from octavo.contracts.schedule import SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.device.cpu import CpuKind
from octavo.engine import inproc_client
from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError
from octavo.executor.uniproc import UniProcExecutor
from octavo.scheduler.speculation import Speculation
from octavo.scheduler.step_update import StepUpdate
from octavo.testing import FakeExecutor, KnownDrafter, expected_tokens, make_request
from octavo.worker.decode_graphs import graph_bytes
from octavo.worker.worker import Worker

NUM_ALIKE = pick(1, 2)  # prompts that are answered by each kind of sampling, before kinds are mixed
PROMPTS = ["Octavo is", "What is a block?", "Sort: 41, 7, 23, 8", "one two three " * 8, "x"]
OPTIONS: dict[str, Any] = {
    "tokenizer": "demo",
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "max_model_len": 96,
    "num_kv_blocks": 14,  # a few requests together need more
    "block_size": 8,
    "device": "cpu",
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.4, "logprobs": 0, "top_k": 30},
    {"temperature": 0.0, "repetition_penalty": 0.8, "logit_bias": {300: 4.0, 5: -100.0}, "logprobs": 1},
    {"structured_output": StructuredOutput(regex="[a-f]{2,9}x"), "ignore_eos": False, "top_p": 0.9},
    {"temperature": 1.5, "allowed_token_ids": [7, 300, 301, 302, 1999], "frequency_penalty": 2.0},
    {"temperature": 1.0, "bad_words": ["e", " the", "one two"], "min_tokens": 4, "stop_token_ids": [300, 310]},
]


Answer = tuple[Any, ...]
Answers = dict[tuple[int, str, bool], Answer]  # by kind, prompt and whether others were in the batch
NUM_TOKENS = 9


def model_outputs(
    place: Place,
    queue: DeviceQueue | None,
    kinds: Iterable[int],
    known: list[list[int]] | None = None,
    num_tokens: int = NUM_TOKENS,
    **options: Any,
) -> Answers:
    """Run prompts with each kind of sampling, then all kinds together; `known` gets what the requests say."""
    place.queue, kinds = queue, list(kinds)
    llm = LLM(place.model, **{**OPTIONS, **options})
    common: dict[str, Any] = {"seed": 7, "max_tokens": num_tokens, "ignore_eos": True}
    batches = [[(kind, prompt, False) for prompt in PROMPTS[:NUM_ALIKE]] for kind in kinds]
    together = [(kind, PROMPTS[kind % len(PROMPTS)], True) for kind in kinds]
    batches += [together[start : start + len(PROMPTS)] for start in range(0, len(kinds), len(PROMPTS))]
    found: Answers = {}
    for batch in batches:
        params = [SamplingParams.from_options({**common, **KINDS[kind]}) for kind, *_ in batch]
        outputs = llm.generate([prompt for _, prompt, _ in batch], params, use_tqdm=False)
        for key, output in zip(batch, outputs, strict=True):
            found[key] = (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
            if known is not None:
                known.append(output.prompt_token_ids + output.outputs[0].token_ids)
    llm.exit()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """What all kinds answer op by op and one step at a time, and those requests in tokens."""

    found: Answers
    known: list[list[int]]

    def has(self, some: Answers, num_tokens: int = NUM_TOKENS) -> bool:
        """Tell whether answers of so many tokens are how these begin."""
        begun = {key: (ids[:num_tokens], logprobs and logprobs[:num_tokens], of_prompt)
                 for key, (ids, logprobs, of_prompt) in self.found.items()}  # fmt: skip
        return bool(some) and all(begun[key] == answer for key, answer in some.items())


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model for the demo's tokenizer. The double calls each op by itself, and the demo has thrice as many."""
    folder = tmp_path_factory.mktemp("two-layers")
    settings = {"vocab_size": 2048, "num_hidden_layers": 2, "max_position_embeddings": 256}
    TinyModel(name="two-layers", family="Qwen3", settings=settings).save(folder)
    return str(folder)


@pytest.fixture
def place(place: Place, two_layers: str) -> Place:
    place.model = two_layers
    return place


@pytest.fixture(scope="module")
def made() -> list[Plain]:
    return []


@pytest.fixture
def plain(place: Place, made: list[Plain]) -> Plain:
    """Made once: it is the same in any company."""
    if not made:
        known: list[list[int]] = []
        made.append(Plain(found=model_outputs(place, None, range(len(KINDS)), known), known=known))
    return made[0]


def test_graphs_and_steps_in_flight_change_nothing(
    place: Place, plain: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs contain only what their steps use, and no option but two makes a step run without a graph."""
    without = [at for at, kind in enumerate(KINDS) if {"prompt_logprobs", "bad_words"} & kind.keys()]
    count, queue = pick(5, NUM_TOKENS), RecordedQueue()
    assert plain.has(model_outputs(place, queue, {*range(len(KINDS))}.difference(without), num_tokens=count), count)
    assert queue.captures >= 3
    assert len(queue.replays) > 20
    assert queue.num_waits > 20
    assert "no graph" not in caplog.text
    [file] = (Path(os.environ["OCTAVO_CACHE"]) / "graphs").iterdir()
    endings = {tuple(ending) for _, _, ending, _ in json.loads(file.read_text())}
    parts = [("is_filtered",), ("has_processors",), ("is_rated",), ("has_processors", "is_filtered", "is_rated")]
    assert {("argmax",), ("drawn",), *(("drawn", *some) for some in parts)} <= endings

    # The next start captures at warm-up.
    place.queue = again = RecordedQueue()
    llm = LLM(place.model, **OPTIONS)
    assert again.captures >= 2
    llm.exit()
    assert plain.has(model_outputs(place, RecordedQueue(), without, num_tokens=count), count)
    eager, some = RecordedQueue(), range(pick(3, len(KINDS)))
    assert plain.has(model_outputs(place, eager, some, num_tokens=count, enforce_eager=True), count)
    assert eager.captures == 0


def test_drafts_change_nothing(place: Place, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts are computed op by op, those without by graphs."""
    drafter = KnownDrafter.of_sequences(plain.known, vocab_size=max(map(max, plain.known)) + 1)
    monkeypatch.setattr(inproc_client, "EngineCore", partial(EngineCore, drafter=drafter))
    queue = RecordedQueue()
    assert plain.has(model_outputs(place, queue, range(4, len(KINDS))))
    assert drafter.num_proposed > drafter.num_accepted > 20
    assert queue.replays


def test_a_draft_model_changes_nothing(place: Place, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its drafts within the step; here it is the model itself, so that most are right."""
    several: list[int] = []
    record = Speculation.record_step

    def note(self: Speculation, output: Any, model_output: Any, update: StepUpdate, took_s: float) -> None:
        record(self, output, model_output, update, took_s)
        several.extend([] if update.counts is None else update.counts.tolist())

    monkeypatch.setattr(Speculation, "record_step", note)
    config = {"model": place.model, "num_speculative_tokens": 3, "adaptive": False}
    some = model_outputs(place, RecordedQueue(), range(pick(8, len(KINDS))), speculative_config=config)
    assert plain.has(some)
    assert several.count(4) > 20


def test_blocks_freed_behind_a_window_are_no_reason_to_go_without_a_graph(place: Place, tmp_path: Path) -> None:
    """Eight blocks of a row at once, every 64 tokens, which is more than the record of one row holds."""
    settings = {"use_sliding_window": True, "sliding_window": 9, "max_position_embeddings": 256}
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    TinyModel(name="mixed", family="Qwen3", settings={**settings, "layer_types": layer_types}).save(tmp_path / "mixed")
    num_tokens = pick(70, 200)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    token_ids, queue = [], RecordedQueue()
    for place.queue in (None, queue):
        options = {**OPTIONS, "max_model_len": 256, "num_kv_blocks": 40}
        with LLM(str(tmp_path / "mixed"), **options) as llm:
            [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        token_ids.append(output.outputs[0].token_ids)
    assert token_ids[0] == token_ids[1]
    assert len(queue.replays) > num_tokens - 5


def test_recurrent_states_in_graphs(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name("qwen3-5").save(tmp_path / "qwen3-5")
    keep_states_often(monkeypatch)
    prompts = [random_prompt(length, seed=length) for length in (20, 3, 1, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=pick(12, 25), ignore_eos=True)
    found, queue = [], RecordedQueue()
    for place.queue in (None, queue):
        with LLM(str(tmp_path / "qwen3-5"), **{**OPTIONS, "max_model_len": 64}) as llm:
            outputs = [output for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)]
            llm.engine.check_integrity()
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert len(queue.replays) > pick(15, 40)


def prefilled(queue: DeviceQueue | None, place: Place, num_requests: int) -> tuple[EngineCore, UniProcExecutor]:
    place.queue = queue
    config = EngineArgs(model_name=place.model, **{**OPTIONS, "max_num_seqs": 4, "num_kv_blocks": 40}).resolve()
    executor = UniProcExecutor(config)
    core = EngineCore(config, executor)
    for index in range(num_requests):
        core.add_request(make_request(f"r{index}", [5 + index, 6, 7], temperature=0.0, max_tokens=12))
    return core, executor


def test_padded_rows_write_nowhere_else(place: Place) -> None:
    """3 requests in a bucket of 4: whatever no request holds keeps what it held, but for the scratch block."""
    queue = RecordedQueue()
    core, executor = prefilled(queue, place, 3)
    runner = executor.worker.runner
    assert runner.graphs is not None
    for _ in range(5):
        core.step()
    assert queue.replays
    block_size = OPTIONS["block_size"]
    [tables] = core.scheduler.running.block_ids
    held = {block for table in tables for block in table}
    free = [block for block in range(40) if block not in held]
    slots = torch.tensor(free)[:, None] * block_size + torch.arange(block_size)
    for cache in runner.kv_caches:
        assert isinstance(cache, LayerKVCache)
        assert cache.key.shape[0] == 41 * block_size
        assert not cache.key[slots].any()
        assert not cache.value[slots].any()
        assert cache.key[40 * block_size].any()
    core.close()


def test_two_steps_are_in_flight_and_their_answers_come_in_order(place: Place) -> None:
    core, executor = prefilled(RecordedQueue(), place, 2)
    scheduler_outputs: list[SchedulerOutput] = []
    begin = executor.worker.begin

    def note(scheduler_output: SchedulerOutput) -> Any:
        scheduler_outputs.append(scheduler_output)
        return begin(scheduler_output)

    executor.worker.begin = note  # type: ignore[method-assign]
    answered = 0
    while core.has_work():
        outputs = core.step()
        answered += bool(outputs.req_ids)
        assert len(scheduler_outputs) - answered <= 1
    assert executor.max_steps_in_flight == 2
    core.check_integrity()
    core.close()


def test_a_row_without_finite_logits_fails_alone(place: Place) -> None:
    core, executor = prefilled(RecordedQueue(), place, 3)
    runner = executor.worker.runner
    for _ in range(4):
        core.step()
    sick_row = next(row for row in range(4) if core.scheduler.running.requests[row] is not None)
    sick = core.scheduler.running.request_at(sick_row).request_id
    slot = core.scheduler.running.block_ids[0][sick_row][0] * OPTIONS["block_size"]
    cache = runner.kv_caches[0]
    assert isinstance(cache, LayerKVCache)
    cache.value[slot] = float("nan")
    reports: dict[str, FinishedRequest] = {}
    while core.has_work():
        reports |= core.step().finished
    assert str(reports.pop(sick).error).startswith("the model's logits contain NaN (in float16,")
    assert [report.finish_reason for report in reports.values()] == ["length", "length"]
    core.check_integrity()
    core.close()


def test_a_failed_device_ends_the_engine(place: Place) -> None:
    class DyingQueue(RecordedQueue):
        def mark(self) -> Any:
            def wait() -> None:
                raise EngineDeadError("the GPU failed")

            return wait

    core, _ = prefilled(DyingQueue(), place, 1)
    with pytest.raises(EngineDeadError, match="the GPU failed"):
        core.step()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_number_of_steps_in_flight_gives_the_same_tokens(depth: int) -> None:
    """The scheduler ahead of its outputs, with a worker that checks each step: chunks, preemption, early ends."""
    config = EngineArgs(
        model_name="demo", max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_kv_blocks=20, max_model_len=64
    ).resolve()
    executor = FakeExecutor(num_blocks=20, block_size=4, vocab_size=7, max_steps_in_flight=depth)
    core = EngineCore(config, executor)
    requests = [
        make_request(f"r{index}", range(1, 4 + 5 * index), seed=index, max_tokens=24, eos_token_ids=[3])
        for index in range(6)
    ]
    for request in requests:
        core.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work():
        outputs = core.step()
        for request_id, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
            tokens[request_id].append(token_id)
    assert tokens == {request.request_id: expected_tokens(request, 64, 7)[0] for request in requests}
    core.check_integrity()


def test_kv_memory_leaves_room_for_the_largest_steps_and_for_graphs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.queue = RecordedQueue()
    peaks = iter([5 << 20, 3 << 20])
    batches: list[ForwardBatch] = []

    def peak_bytes(kind: CpuKind, run: Callable[[], None]) -> int:
        run()
        return next(peaks)

    monkeypatch.setattr(CpuKind, "peak_bytes", peak_bytes)
    options = {**OPTIONS, "max_num_batched_tokens": 200, "num_kv_blocks": None}
    worker = Worker(EngineArgs(model_name="demo", **options).resolve())
    worker.load_model()
    plan = worker.devices.attention(torch.float32).plan

    def note(self: FixedAttention, batch: ForwardBatch) -> torch.Tensor:
        batches.append(batch)
        planned: torch.Tensor = plan(batch)
        return planned

    monkeypatch.setattr(FixedAttention, "plan", note)
    report = worker.measure_memory()
    assert report.activation_bytes == 5 << 20
    assert report.graph_bytes == graph_bytes(3 << 20)
    prefill, decode = batches
    assert prefill.query_start_loc_list == [0, 96, 192, 200]
    assert prefill.seq_lens.tolist() == prefill.seq_lens_list == [96, 96, 8]
    assert decode.seq_lens.tolist() == [1, 1, 1]
    assert decode.seq_lens_list == [96, 96, 96]
    assert decode.block_table.shape == (3, 12)
    assert max(int(batch.slot_mapping.max()) for batch in batches) < 96


def test_an_estimate_serves_where_nobody_counts(place: Place) -> None:
    worker = Worker(EngineArgs(model_name="demo", **{**OPTIONS, "num_kv_blocks": None}).resolve())
    worker.load_model()
    assert worker.measure_memory().graph_bytes == 0
    assert worker.measure_memory().activation_bytes > 0
