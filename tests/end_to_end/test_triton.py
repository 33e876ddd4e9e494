"""Whole engines on Triton's kernels, interpreted on a CPU: the tokens of the CPU's own kernels, by every path."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.breadth import pick
from tests.end_to_end.conftest import Checkpoint, GetCheckpoint, MakeLLM
from tests.end_to_end.support import random_prompt
from tests.fakes.queued_device import CalledQueue
from tests.kernels.levels import LEVELS
from tests.kernels.triton.device import DEVICE
from tests.models.tiny import TinyModel

from octavo import LLM
from octavo.attention.triton_paged import TritonAttention
from octavo.device.cpu import CpuKind
from octavo.kernels.quantization import Float8Format
from octavo.kernels.quantize import quantize
from octavo.kernels.reference import Kernels
from octavo.kernels.triton import draw
from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.types import LinearRole, PackedLinear
from octavo.sampling_params import SamplingParams

PROMPTS = [random_prompt(length, seed=length) for length in (3, 20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SHORT_PROMPTS = PROMPTS[:1]
MIXED = [
    GREEDY.replace(repetition_penalty=1.5, logit_bias={7: 3.0}),
    GREEDY.replace(temperature=0.8, top_k=20, top_p=0.9, seed=3),
    GREEDY.replace(temperature=1.0, frequency_penalty=1.0, bad_words=["a"], logprobs=2, seed=4),
]
# One layer with a window and one without: the interpreter takes as long for each.
TWO_LAYERS = TinyModel(
    name="two-layers",
    family="Qwen3",
    settings={
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
MODELS = pick([TWO_LAYERS.name], ["llama-biases", "qwen3-mixed-windows", "qwen2-moe", "gpt-oss"])
needs_native = pytest.mark.skipif(not LEVELS, reason="the C++ kernels were not built")


@pytest.fixture(scope="module")
def checkpoint(checkpoint: GetCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> GetCheckpoint:
    folder = tmp_path_factory.mktemp("two-layers")
    two_layers = Checkpoint(folder=folder, reference=TWO_LAYERS.save(folder))
    return lambda name: two_layers if name == TWO_LAYERS.name else checkpoint(name)


@pytest.fixture
def make_pair(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LLM, LLM]]:
    """Return what makes a model on the CPU's own kernels, and on Triton's with options; `weights` are for both."""

    def make(name: str, *, weights: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> tuple[LLM, LLM]:
        plain = make_llm(name, device="cpu", **weights)
        monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
        return plain, make_llm(name, device=DEVICE.type, **weights, **options)

    return make


def tokens_of(llm: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams] = GREEDY) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the names of attention's launches will be added to."""
    seen: list[str] = []

    def wrap(name: str) -> Any:
        launch = getattr(TritonAttention, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return launch(*args, **kwargs)

        return watched

    for name in ("write_kv", "attend"):
        monkeypatch.setattr(TritonAttention, name, wrap(name))
    return seen


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has a queue of its own")
def test_padded_steps_on_static_tensors_give_the_same_tokens(
    make_pair: Callable[..., tuple[LLM, LLM]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What CUDA graphs capture, without the capture: 3 rows in a bucket of 4, lengths on the host as bounds.

    Beside chunks of a prompt, and then behind a prefix from the cache.
    """
    queue, prompts = CalledQueue(), [*PROMPTS, random_prompt(2, seed=2)]
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(CpuKind, "queue", lambda kind: queue if "OCTAVO_GPU_KERNELS" in os.environ else None)
    monkeypatch.setattr(draw, "_DRAWN_PART", 1024)  # the vocabulary is small, and the interpreter slow
    monkeypatch.setattr(draw, "_FEWEST_IDS", 256)
    plain, triton = make_pair(TWO_LAYERS.name, max_num_seqs=4, max_num_batched_tokens=18)
    expected, kernels = tokens_of(plain, prompts, MIXED), watch(monkeypatch)
    assert tokens_of(triton, prompts, MIXED) == expected
    assert tokens_of(triton, prompts[1:2], MIXED[1:2]) == expected[1:2]
    assert set(kernels) == {"write_kv", "attend"}
    assert queue.captures
    assert queue.replays


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has a queue of its own")
@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, pytest.param("int4", marks=needs_native)])
def test_experts_in_padded_steps_answer_alike_and_count_no_padding(
    quantization: str | None,
    make_pair: Callable[..., tuple[LLM, LLM]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    queue, prompts = CalledQueue(), [*PROMPTS, random_prompt(2, seed=2)]
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(CpuKind, "queue", lambda kind: queue if "OCTAVO_GPU_KERNELS" in os.environ else None)
    weights = {} if quantization is None else {"dtype": "bfloat16", "quantization": quantization}
    plain, triton = make_pair("qwen2-moe", weights=weights, max_num_seqs=4)
    assert tokens_of(triton, prompts) == tokens_of(plain, prompts)
    assert queue.replays
    assert tokens_per_layer(triton) == tokens_per_layer(plain)


def tokens_per_layer(llm: LLM) -> dict[int, int]:
    """Return how many choices of experts were counted in each layer."""
    [load] = llm.engine._front.outputs.metrics.expert_load_by_replica.values()
    return {layer: sum(counts) for layer, counts in load.of_layers().items()}


@pytest.mark.full  # by default the steps above are in chunks, too
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_cpu(
    name: str, make_pair: Callable[..., tuple[LLM, LLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decodes, then found in the prefix cache."""
    plain, triton = make_pair(name, max_num_batched_tokens=18)
    expected = tokens_of(plain, PROMPTS)
    kernels = watch(monkeypatch)
    assert tokens_of(triton, PROMPTS) == expected
    assert tokens_of(triton, PROMPTS[1:]) == expected[1:]
    assert set(kernels) == {"write_kv", "attend"}


@pytest.mark.full
@needs_native
@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama-biases", "int8"), ("qwen2-moe", "int4"), ("qwen3-moe", "int8")],
)
def test_weights_in_integers_give_the_tokens_of_the_cpu(
    name: str, quantization: str, make_pair: Callable[..., tuple[LLM, LLM]]
) -> None:
    plain, triton = make_pair(
        name, weights={"dtype": "bfloat16", "quantization": quantization}, max_num_batched_tokens=16
    )
    assert tokens_of(triton, SHORT_PROMPTS) == tokens_of(plain, SHORT_PROMPTS)


@pytest.mark.full
def test_weights_in_8_bit_floats_are_the_nearest_weights(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of weights that are rounded before they are packed as ever."""

    def pack_rounded(
        kernels: TritonKernels, weight: torch.Tensor, bias: torch.Tensor | None, role: LinearRole, form: None
    ) -> PackedLinear:
        return Kernels.pack_linear(kernels, quantize(weight, Float8Format()).dequantized(), bias)

    monkeypatch.setenv("OCTAVO_GPU_KERNELS", "triton")
    monkeypatch.setattr(TritonKernels, "pack_linear", pack_rounded)
    options = {"device": DEVICE.type, "dtype": "float32", "max_num_batched_tokens": 16}
    rounded, in_floats = (make_llm("llama-biases", quantization=name, **options) for name in (None, "fp8"))
    assert tokens_of(in_floats, SHORT_PROMPTS) == tokens_of(rounded, SHORT_PROMPTS)
