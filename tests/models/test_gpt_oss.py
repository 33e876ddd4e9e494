"""gpt-oss with experts in MXFP4: what is stored is computed. Its other forms are in the table of tiny models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import run_ranks
from tests.models.gpt_oss import case, save_mxfp4, write_gguf
from tests.models.paged import PagedRunner, load, make_context
from tests.models.test_exactness import TOLERANCE, random_tokens, reference_logits

from octavo.attention.torch_sdpa import SdpaAttention
from octavo.config.engine import LoadConfig
from octavo.config.hf import read_model_config
from octavo.config.hf_quantization import resolve_quantization
from octavo.config.model import QuantizationName
from octavo.convert.run import convert
from octavo.convert.source import Checkpoint, TargetOptions
from octavo.distributed.groups import ParallelGroups
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.kernels.dispatch import native_kernels
from octavo.kernels.reference import Kernels
from octavo.layers.linear import MergedLinear
from octavo.layers.quant.registry import resolve_schemes
from octavo.loader.packed_cache import PackedCache
from octavo.loader.registry import get_model_loader
from octavo.models.interfaces import CausalLM
from octavo.worker.memory import empty_model, weights_bytes

needs_native = pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels compute with blocks")
TOKENS = random_tokens(41, seed=1)
PUBLISHED: dict[str, Any] = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # what GGUF files do not say


def experts_of(model: CausalLM) -> list[MergedLinear]:
    found = model.named_modules()
    return [part for name, part in found if isinstance(part, MergedLinear) and ".experts." in name]


def test_in_float32_experts_are_the_values_of_the_blocks(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path)
    [logits] = PagedRunner(load(tmp_path)).step({0: TOKENS})
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=TOLERANCE, rtol=0)


@needs_native
def test_in_half_precision_they_are_computed_as_stored(tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    experts = experts_of(model)
    assert {linear.scheme.name for linear in experts} == {"gguf MXFP4"}
    for linear in experts:
        rows = -sum(linear._sizes) % 32 + sum(linear._sizes)
        assert linear.packed.weight.nbytes == rows * linear.inputs.size * 17 // 32 + padding(linear)
    [logits] = PagedRunner(model).step({0: TOKENS})
    expected = reference_logits(reference, TOKENS)
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.08  # activations are rounded to 8 bits


def padding(linear: MergedLinear) -> int:
    """The exponents of a strip of 16 outputs are padded to 64 bytes: a chunk has 8 groups or fewer."""
    groups = linear.inputs.size // 32
    strips = (sum(linear._sizes) + 31) // 32 * 2
    return strips * (-(groups % 8) * 16 % 64)


@needs_native
def test_a_row_has_one_answer_alone_in_a_batch_and_in_chunks(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    [alone] = PagedRunner(model).step({0: TOKENS})
    others = {request: random_tokens(request + 2, seed=2) for request in range(1, 9)}
    runner = PagedRunner(model, num_blocks=128, seed=3)
    pieces = [runner.step({0: TOKENS[:7], **others})[0], runner.step({3: [5], 0: TOKENS[7:24]})[1]]
    pieces += [runner.step({0: [token]})[0] for token in TOKENS[24:]]
    assert torch.equal(torch.cat(pieces), alone)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
def test_two_ranks_share_each_expert(dtype: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    [alone] = PagedRunner(load(tmp_path, dtype=dtype)).step({0: TOKENS})

    def body(groups: ParallelGroups) -> torch.Tensor:
        return PagedRunner(load(tmp_path, dtype=dtype, groups=groups)).step({0: TOKENS})[0]

    first, second = run_ranks(body, 2)
    assert torch.equal(first, second)
    if dtype == "float32":
        torch.testing.assert_close(first, alone, atol=TOLERANCE, rtol=0)
    else:
        errors = (first - alone).norm(dim=-1) / alone.norm(dim=-1)
        assert errors.median() < 0.08


def test_gguf_files_of_floats_give_the_logits_of_the_checkpoint(tmp_path: Path) -> None:
    case(**PUBLISHED).save(tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    assert torch.equal(PagedRunner(load(file)).step({0: TOKENS})[0], PagedRunner(load(tmp_path)).step({0: TOKENS})[0])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
def test_both_layouts_of_mxfp4_give_the_same_bits(dtype: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path, **PUBLISHED)
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    models = [load(path, dtype=dtype) for path in (file, tmp_path)]
    of_file, of_folder = ({linear.scheme.name for linear in experts_of(model)} for model in models)
    assert of_file == of_folder == {"dense" if dtype == "float32" else "gguf MXFP4"}
    assert torch.equal(*(PagedRunner(model).step({0: TOKENS})[0] for model in models))


def test_conversions_copy_checkpoints_and_refuse_files(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model", **PUBLISHED)
    convert(Checkpoint.open(str(tmp_path / "model")), tmp_path / "copy", "safetensors", TargetOptions())
    logits, expected = (PagedRunner(load(tmp_path / name)).step({0: TOKENS})[0] for name in ("copy", "model"))
    assert torch.equal(logits, expected)
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"model\.gguf: a GGUF file of this architecture cannot be converted"
    ):
        Checkpoint.open(str(file))


@needs_native
@pytest.mark.parametrize("quantization", ["dequantize", "int8"])
def test_other_forms_are_made_of_the_values(quantization: QuantizationName, tmp_path: Path) -> None:
    reference = save_mxfp4(tmp_path, num_experts_per_tok=5)  # all, so that no rounding chooses others
    stored = read_model_config(tmp_path, model="m", dtype="bfloat16")
    asked, config = resolve_quantization(quantization, stored, tmp_path)
    context = make_context(torch.bfloat16, quantization=asked)
    model = get_model_loader(LoadConfig(load_format="auto", seed=0)).load_model(config, context)
    assert {"dense", "8 bits, quantized at load"} >= {linear.scheme.name for linear in experts_of(model)}
    logits, expected = PagedRunner(model).step({0: TOKENS})[0], reference_logits(reference, TOKENS)
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.2  # attention is in 8 bits as well


@needs_native
def test_dummy_weights_in_mxfp4_are_harmless_to_compute_with(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    logits = PagedRunner(load(tmp_path, dtype="bfloat16", load_format="dummy")).step({0: TOKENS})[0]
    assert 0.1 < logits.std() < 10.0


def test_kernels_without_blocks_compute_the_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on GPUs, in bfloat16, and whatever the checkpoint says of its weights."""
    reference = save_mxfp4(tmp_path, num_experts_per_tok=5)
    config = read_model_config(tmp_path, model="m", dtype="bfloat16")
    schemes, kernels = resolve_schemes(config.quantization, None, lambda forms: Kernels(), "a GPU")
    assert "MXFP4: tensors are dequantized at load" in caplog.text
    context = replace(make_context(torch.bfloat16), schemes=schemes, kernels=kernels)
    context = replace(context, attention=SdpaAttention(kernels, torch.bfloat16))
    model = get_model_loader(LoadConfig(load_format="auto", seed=0)).load_model(config, context)
    logits, expected = PagedRunner(model).step({0: TOKENS})[0], reference_logits(reference, TOKENS)
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.08


@needs_native
def test_packed_experts_come_back_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("octavo.loader.packed_cache._WORTH_KEEPING_BYTES", 0)
    monkeypatch.setattr(PackedCache, "keep_soon", PackedCache.keep)
    save_mxfp4(tmp_path)
    config = read_model_config(tmp_path, model="m", dtype="bfloat16")
    load_config = LoadConfig(load_format="auto", seed=0, packed_cache_bytes=1 << 30)
    context = make_context(torch.bfloat16, checkpoint=config.quantization)
    first, second = (get_model_loader(load_config).load_model(config, context) for _ in range(2))
    assert second.mapped_bytes > 0
    assert torch.equal(PagedRunner(second).step({0: TOKENS})[0], PagedRunner(first).step({0: TOKENS})[0])


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    stored, floats = (empty_model(read_model_config(tmp_path, model="m", dtype=d)) for d in ("bfloat16", "float32"))
    for linear in experts_of(stored):
        num_biases = sum(linear._sizes)
        assert linear.num_bytes == (linear.num_weights - num_biases) * 17 // 32 + 2 * num_biases
    assert weights_bytes(stored) < weights_bytes(floats) / 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, tensor: None if name.endswith("scales") else tensor,
            "MXFP4 is blocks and scales, one is missing",
        ),
        (lambda name, tensor: tensor[..., :1] if name.endswith("scales") else tensor, "do not fit together"),
        (lambda name, tensor: tensor[:3] if name.endswith("bias") else tensor, "a stack of 5 experts in 2 dimensions"),
    ],
)
def test_damaged_stacks_are_named(change: Any, message: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    at_experts = {name: change(name, tensor) if "experts" in name else tensor for name, tensor in tensors.items()}
    kept = {name: tensor.contiguous() for name, tensor in at_experts.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
