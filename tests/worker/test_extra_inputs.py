"""Adapters, embeddings, three-axis rotary positions: alone, batched, chunked, preempted, pipelined, replayed."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tests.breadth import pick
from tests.end_to_end.conftest import Checkpoint
from tests.fakes.queued_device import RecordedQueue
from tests.models.tiny import MAX_LEN, VOCAB_SIZE, TinyModel
from tests.worker.conftest import Place
from tests.worker.extra_model import LlamaForCausalLM
from tests.worker.threaded_ranks import ThreadedRanks

from octavo.config import families
from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig
from octavo.contracts.engine import AdapterRef, EmbeddingSpan, EngineCoreRequest, ExtraInputs
from octavo.contracts.schedule import NewRequestData
from octavo.engine.core import EngineCore
from octavo.executor.base import Executor, make_executor
from octavo.kernels.dispatch import native_kernels
from octavo.scheduler.gate import Gate
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import make_request
from octavo.worker.graph import StepGraph

MODELS = {family: TinyModel(name=family, family=family, settings={"head_dim": 6}) for family in ("Llama", "Qwen2")}
SECTIONS = (1, 1, 1)  # of 3 frequencies
HIDDEN_SIZE = 36
Said = dict[str, tuple[list[int], Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Tiny models of transformers and where they are saved."""
    made = {}
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = Checkpoint(folder=folder, reference=model.save(folder))
    return made


@pytest.fixture(autouse=True)
def _extra_model(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = replace(families.FAMILIES["LlamaForCausalLM"], model="tests.worker.extra_model:LlamaForCausalLM")
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, llama.name: llama})


def with_sections(config: EngineConfig, sections: tuple[int, ...]) -> EngineConfig:
    rotary = tuple(replace(each, rope=replace(each.rope, sections=sections)) for each in config.model.rotary)
    return replace(config, model=replace(config.model, rotary=rotary))


def config_of(folder: Path, **options: Any) -> EngineConfig:
    defaults = {"dtype": "float32", "max_model_len": MAX_LEN, "block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 8}
    args = EngineArgs.from_options({"model_name": str(folder), "tokenizer": "demo", **defaults, **options})
    config = args.resolve()
    return with_sections(config, SECTIONS)


def grid_positions(start: int, height: int, width: int, end: int) -> NDArray[np.int32]:
    """Return positions [3, end] of a prompt with an image of height * width tokens at `start`, as Qwen2-VL counts."""
    image = np.stack(np.meshgrid([0], range(height), range(width), indexing="ij")).reshape(3, -1) + start
    behind = np.arange(end - start - height * width) + start + max(height, width)
    text = np.arange(start)
    return np.concatenate([np.tile(text, (3, 1)), image, np.tile(behind, (3, 1))], axis=1).astype(np.int32)


def span_of(start: int, num_tokens: int, seed: int) -> EmbeddingSpan:
    rows = np.random.default_rng(seed).standard_normal((num_tokens, HIDDEN_SIZE), dtype=np.float32)
    return EmbeddingSpan(start=start, num_tokens=num_tokens, embeddings=rows.tobytes())


def adapter_of(slot: int) -> AdapterRef:
    return AdapterRef(name=f"adapter {slot}", path="", content_hash=str(slot), rank=1)


def extras(length: int) -> list[tuple[ExtraInputs | None, AdapterRef | None]]:
    grid = grid_positions(3, 2, 4, length).tobytes()
    return [
        (None, None),
        (None, adapter_of(0)),
        (ExtraInputs(embedding_spans=[span_of(0, 2, seed=1), span_of(9, 6, seed=2)]), adapter_of(1)),
        (ExtraInputs(rotary_positions=grid), None),
        (ExtraInputs(embedding_spans=[span_of(3, 8, seed=3)], rotary_positions=grid), None),
        (ExtraInputs(embedding_spans=[span_of(3, 8, seed=4)], rotary_positions=grid), None),
    ]


def requests() -> list[EngineCoreRequest]:
    """Requests whose prompts differ in length alone: what they say differs by what else they bring."""
    tokens = random.Random(0).choices(range(3, VOCAB_SIZE), k=30)
    return [
        make_request(
            f"{length}-{at}",
            tokens[:length],
            extra_inputs=extra,
            adapter=adapter,
            max_tokens=8,
            seed=at % 2,
            logprobs=2,
            ignore_eos=True,
        )
        for length in (30, 21)
        for at, (extra, adapter) in enumerate(extras(length))
    ]


class FixedSlots(Gate):
    """Every adapter has a slot, which the model of these tests has filled itself."""

    reason = "slot"

    def hold(self, request: Request) -> bool:
        return False

    def take_ready(self, now_s: float) -> list[Request]:
        return []

    def forget(self, request: Request) -> None:
        """No-op: nothing is counted."""

    def on_admit(self, request: Request, data: NewRequestData) -> NewRequestData:
        adapter = request.message.adapter
        return data if adapter is None else replace(data, adapter_slot=int(adapter.content_hash))


def make_core(config: EngineConfig, executor: Executor) -> EngineCore:
    core = EngineCore(config, executor)
    num_batches = config.parallel.pipeline_parallel_size
    core.scheduler = Scheduler(config.scheduler, core.scheduler.running, gates=[FixedSlots()], num_batches=num_batches)
    return core


def run(executor: Executor, config: EngineConfig, batches: list[list[EngineCoreRequest]]) -> Said:
    """Return what requests say, and its log-probabilities, each batch after the one before."""
    core, tokens, logprobs = make_core(config, executor), dict[str, list[int]](), dict[str, list[Any]]()
    for batch in batches:
        for request in batch:
            core.add_request(request)
        while core.has_work():
            outputs = core.step()
            assert all(report.error is None for report in outputs.finished.values()), outputs.finished
            for request_id, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
                tokens.setdefault(request_id, []).append(token_id)
                logprobs.setdefault(request_id, []).extend(outputs.logprobs.get(request_id, ()))
    core.check_integrity()
    num_preemptions = core.scheduler.stats().num_preemptions_total
    core.close()
    return {each: (tokens[each], logprobs[each]) for each in tokens} | {"": ([num_preemptions], None)}


def alone(config: EngineConfig) -> Said:
    return run(make_executor(config), config, [[request] for request in requests()])


DTYPES = ["float32"] if native_kernels() is None else pick(["bfloat16"], ["float32", "bfloat16"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_any_company(dtype: str, folders: dict[str, Checkpoint]) -> None:
    folder = folders["Llama"].folder
    base = {"dtype": dtype, "enable_prefix_caching": False}  # a state is not in the prefix cache
    expected = alone(config_of(folder, **base))
    del expected[""]
    assert len({str(said) for said in expected.values()}) == len(expected)
    ways: list[tuple[dict[str, Any], Callable[[EngineConfig], Any]]] = [
        ({}, make_executor),
        ({"max_num_batched_tokens": 9}, make_executor),
        ({"num_kv_blocks": MAX_LEN // 4}, make_executor),
        ({"max_num_batched_tokens": 14, "pipeline_parallel_size": 2}, ThreadedRanks),
    ]
    for options, make in ways:
        config = config_of(folder, **base, **options)
        said = run(make(config), config, [requests()])
        assert (said.pop("")[0][0] > 0) is ("num_kv_blocks" in options)
        assert said == expected, options


def test_steps_in_flight_and_graphs(
    place: Place, folders: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step with an adapter or three-axis positions is not replayed; others are."""
    monkeypatch.setattr(LlamaForCausalLM, "has_state", False)
    config = config_of(folders["Llama"].folder, device="cpu", num_kv_blocks=64)
    expected = alone(config)
    place.queue = queue = RecordedQueue()
    plain = [make_request(f"plain {at}", [5 + at, 6], max_tokens=9) for at in range(3)]
    said = run(make_executor(config), config, [requests(), plain])
    assert {each: said[each] for each in expected} == expected
    assert queue.replays


@pytest.mark.skipif(native_kernels() is None, reason="nothing is recorded")
def test_a_recording_serves_steps_without_adapters_alone(
    folders: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[bool] = []
    replay = StepGraph.run

    def note(self: StepGraph, batch: Any, incoming: Any) -> Any:
        replayed.append(batch.adapter_ids is None)
        return replay(self, batch, incoming)

    monkeypatch.setattr(StepGraph, "run", note)
    config = config_of(folders["Llama"].folder)
    said = run(make_executor(config), config, [[request] for request in requests()])
    assert len(said) == len(requests()) + 1
    assert replayed
    assert all(replayed)


def test_blocks_are_shared_by_those_alone_who_bring_the_same(folders: dict[str, Checkpoint]) -> None:
    config = config_of(folders["Llama"].folder)
    core, cached = make_core(config, make_executor(config)), []
    for salt in (None, "", "other"):
        for extra, adapter in [*extras(30), *extras(30)]:
            request = make_request(
                "r", range(3, 33), max_tokens=1, extra_inputs=extra, adapter=adapter, cache_salt=salt
            )
            core.add_request(request)
            while core.has_work():
                cached += [admitted.num_cached_tokens for admitted in core.step().admitted.values()]
    core.close()
    assert cached == ([0] * 6 + [28] * 6) * 3


def test_what_a_model_would_not_read_is_refused(folders: dict[str, Checkpoint]) -> None:
    config = config_of(folders["Qwen2"].folder)
    one_axis = with_sections(config, ())
    core = make_core(one_axis, make_executor(one_axis))
    core.add_request(make_request("r", range(3, 33), max_tokens=1, extra_inputs=extras(30)[3][0]))
    assert "rotary_positions" in str(core.step().finished["r"].error)
    core.close()


def test_greedy_is_that_of_qwen2_vl(folders: dict[str, Checkpoint]) -> None:
    """Its text model on the weights of a Qwen2, with an image's embeddings in place of tokens'."""
    source = folders["Qwen2"].reference
    text = {key: value for key, value in source.config.to_dict().items() if key not in ("model_type", "architectures")}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": list(SECTIONS)}
    vl_config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLTextConfig(**text)
    vl_config._attn_implementation = "eager"
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel(vl_config).eval()
    model.load_state_dict(source.model.state_dict())
    config, tokens, image = config_of(folders["Qwen2"].folder), list(range(5, 26)), span_of(3, 8, seed=5)
    positions = grid_positions(3, 2, 4, len(tokens))
    extra = ExtraInputs(embedding_spans=[image], rotary_positions=positions.tobytes())
    request = make_request("r", tokens, extra_inputs=extra, temperature=0.0, max_tokens=10, ignore_eos=True)
    said = run(make_executor(config), config, [[request]])["r"][0]

    embeds = source.get_input_embeddings()(torch.tensor([tokens + said]))
    embeds[0, 3:11] = torch.from_numpy(np.frombuffer(image.embeddings, dtype=np.float32).reshape(8, -1).copy())
    behind = np.tile(np.arange(len(said)) + positions.max() + 1, (3, 1))
    position_ids = torch.from_numpy(np.concatenate([positions, behind], axis=1).astype(np.int64))[:, None]
    with torch.no_grad():
        logits = source.lm_head(model(inputs_embeds=embeds, position_ids=position_ids).last_hidden_state)[0]
    assert logits[len(tokens) - 1 : -1].argmax(-1).tolist() == said
