"""Recorded steps are bit-equal to running op by op, for any number of tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.models.tiny import TINY_MODELS
from torch import nn

from octavo import LLM, SamplingParams
from octavo.config.args import EngineArgs
from octavo.errors import RecordingError
from octavo.inputs import Prompt
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.native import TapeBuffers
from octavo.layers.norm import RMSNorm
from octavo.models.common import GatedMLP
from octavo.worker.graph import StepGraph, refuse_torch_ops
from octavo.worker.worker import Worker

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels are recorded")

PROMPTS = ["Octavo is", "What is a block?", "Sort: 41, 7, 23, 8", "one two three " * 40]


DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def answers(**options: Any) -> list[tuple[list[int], float | None]]:
    llm = LLM("demo", max_num_batched_tokens=48, **options)
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, logprobs=1, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.exit()
    return [(list(output.token_ids), output.cumulative_logprob) for output in outputs]


@DTYPES
def test_graph_is_eager(dtype: str) -> None:
    assert answers(dtype=dtype) == answers(dtype=dtype, enforce_eager=True)


@pytest.mark.parametrize(
    ("name", "options"),
    pick(
        [("qwen2-moe", {"dtype": "float32"}), ("qwen3-moe-mixed", {"quantization": "int4"}), ("gemma4-shared", {})],
        [
            (name, options)
            for name in ("qwen2-moe", "qwen3-moe-mixed", "gemma4-shared")
            for options in ({}, {"dtype": "float32"}, {"quantization": "int4"})
        ],
    ),
    ids=str,
)
def test_what_layers_have_is_recorded_too(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    next(case for case in TINY_MODELS if case.name == name).save(tmp_path)
    found = []
    for enforce_eager in (False, True):
        settings: dict[str, Any] = {"dtype": "bfloat16", **options, "tokenizer": "demo", "enforce_eager": enforce_eager}
        llm = LLM(str(tmp_path), max_num_batched_tokens=20, num_kv_blocks=64, **settings)
        prompts: list[Prompt] = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (1, 17, 40)]
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=12, logprobs=1, ignore_eos=True)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.exit()
        found.append([(output.token_ids, output.cumulative_logprob) for output in outputs])
        worker = Worker(EngineArgs(model_name=str(tmp_path), num_kv_blocks=64, **settings).resolve())
        worker.load_model()
        worker.initialize_kv_cache([64] * len(worker.config.model.kv_groups))
        assert isinstance(worker.runner.graph, StepGraph) is not enforce_eager
    assert found[0] == found[1]


@DTYPES
def test_enforce_eager_captures_nothing(dtype: Any) -> None:
    for enforce_eager in (False, True):
        worker = Worker(EngineArgs(dtype=dtype, num_kv_blocks=64, enforce_eager=enforce_eager).resolve())
        worker.load_model()
        worker.initialize_kv_cache([64])
        assert isinstance(worker.runner.graph, StepGraph) is not enforce_eager


def test_a_model_on_torch_ops_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", "torch")
    worker = Worker(EngineArgs(dtype="float32", num_kv_blocks=64).resolve())
    worker.load_model()
    worker.initialize_kv_cache([64])
    assert worker.runner.graph is None


def test_buffers_serve_again_once_their_tensor_is_gone() -> None:
    buffers = TapeBuffers()
    first = buffers.empty((4, 8), torch.bfloat16)
    second = buffers.empty((4, 8), torch.bfloat16)
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    third = buffers.empty((8, 4), torch.bfloat16)
    assert third.data_ptr() == address
    assert buffers.num_bytes == 2 * 64


def sneaky_worker(monkeypatch: pytest.MonkeyPatch, mlp: type[GatedMLP]) -> Worker:
    monkeypatch.setattr("octavo.models.interfaces.GatedMLP", mlp)
    worker = Worker(EngineArgs(model_name="demo", num_kv_blocks=64, dtype="bfloat16").resolve())
    worker.load_model()
    return worker


class SneakyMLP(GatedMLP):
    """Doubles by a torch op."""

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = super().forward(norm, x, residual, adapter_ids)
        return out + out, total


class OpenMLP(SneakyMLP):
    """Says that it does."""

    is_recordable = False


def test_a_torch_op_that_a_recording_would_miss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = sneaky_worker(monkeypatch, SneakyMLP)
    with pytest.raises(RecordingError, match=r"add in layers\.0\.mlp"):
        worker.initialize_kv_cache([64])


def test_reading_values_is_refused() -> None:
    """Python that depends on a tensor's values would be frozen into the recording."""
    x = torch.ones(2, 2)
    reads: list[Callable[[], object]] = [lambda: torch.equal(x, x), lambda: 1.0 in x, lambda: f"{x[0, 0]}", x.tolist]
    for read in reads:
        with pytest.raises(RecordingError, match="in Linear: a recording"), refuse_torch_ops(nn.Linear(2, 2)):
            read()
    with refuse_torch_ops(nn.Linear(2, 2)):
        assert x.view(4).shape == (4,)
        assert x.is_contiguous()


def test_what_cannot_be_recorded_runs_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = sneaky_worker(monkeypatch, OpenMLP)
    with caplog.at_level("INFO"):
        worker.initialize_kv_cache([64])
    assert worker.runner.graph is None
    assert "steps run op by op: OpenMLP (layers.0.mlp) cannot be recorded" in caplog.text
