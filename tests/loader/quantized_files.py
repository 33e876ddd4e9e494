"""Quantized checkpoints as other programs write them, each beside the dense checkpoint that it stands for.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import TinyModel

# Sizes that fill words and groups; heads of 16 and 4 kv heads, so that two ranks cut groups of 64 in the middle.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]
# From a weight [N, K] to what a file has of it, by endings of names, and to the dense weight that this stands for.
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def save_pair(folder: Path, settings: dict[str, Any], is_quantized: Callable[[str], bool], quantize: Quantize) -> None:
    """Save a tiny Qwen3 to folder/dense in float32, and to folder/quantized with `settings` as its configuration."""
    TinyModel(name="quantized", family="Qwen3", settings=SIZES).save(folder / "dense")
    dense = load_file(folder / "dense" / "model.safetensors")
    quantized: Tensors = {}
    for name, tensor in list(dense.items()):
        layer = name.removesuffix(".weight")
        if not layer.endswith(PROJECTIONS) or not is_quantized(layer):
            quantized[name] = tensor
            continue
        parts, dense[name] = quantize(tensor)
        quantized.update({f"{layer}.{ending}": part.contiguous() for ending, part in parts.items()})
    save_file(dense, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
    (folder / "quantized").mkdir()
    save_file(quantized, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "dense" / "config.json").read_text())
    (folder / "quantized" / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def to_words(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Put non-negative integers [R, C] into words [R, C * bits / 32] int32, the first in the lowest bits."""
    in_word = 32 // bits
    padded = torch.nn.functional.pad(integers.long(), (0, -integers.shape[1] % in_word))
    words = (padded.view(len(integers), -1, in_word) << (bits * torch.arange(in_word))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def rounded(weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, is_symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return integers n [N, K] of 0 ... 2^bits - 1, scales [N, G] of float16 and zeros [N, G]; group_of is [K]."""
    num_groups, most = int(group_of.max()) + 1, 2**bits - 1
    scales, zeros = (torch.empty(len(weight), num_groups) for _ in range(2))
    for group in range(num_groups):
        columns = weight[:, group_of == group]
        low, high = columns.amin(1).clamp(max=0.0), columns.amax(1).clamp(min=0.0)
        span = 2.0 * torch.maximum(-low, high) if is_symmetric else high - low
        scales[:, group] = (span / most).half().float()
        middle = torch.full_like(low, 2.0 ** (bits - 1))
        zeros[:, group] = middle if is_symmetric else (-low / scales[:, group]).round().clamp(1, most)
    integers = (weight / scales[:, group_of] + zeros[:, group_of]).round().clamp(0, most)
    return integers, scales, zeros


def gptq(bits: int, group_size: int, *, is_symmetric: bool, added: int = 1, has_order: bool = False) -> Quantize:
    """Return what writes GPTQ's tensors; with `has_order`, groups are not made of neighbours."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        in_size = weight.shape[1]
        group_of = torch.arange(in_size) // (in_size if group_size == -1 else group_size)
        if has_order:
            group_of = group_of[torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size))]
        n, scales, zeros = rounded(weight, bits, group_of, is_symmetric=is_symmetric)
        dense = scales[:, group_of] * (n - zeros[:, group_of])
        tensors = {
            "qweight": to_words(n, bits).T,
            "qzeros": to_words((zeros - added).T, bits),
            "scales": scales.T.half(),
            "g_idx": group_of.to(torch.int32),
        }
        return tensors, dense

    return quantize


def compressed(bits: int, group_size: int | None, *, is_symmetric: bool, is_packed: bool) -> Quantize:
    """Return what writes the tensors of compressed-tensors."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of = torch.arange(weight.shape[1]) // (group_size or weight.shape[1])
        n, scales, zeros = rounded(weight, bits, group_of, is_symmetric=is_symmetric)
        half = 2 ** (bits - 1)
        tensors = {"weight_scale": scales}
        if is_packed:
            tensors |= {"weight_packed": to_words(n, bits), "weight_shape": torch.tensor(weight.shape)}
        else:
            tensors["weight"] = (n - half).to(torch.int8)
        if not is_symmetric:
            packed, plain = to_words(zeros.T, bits).T, (zeros - half).to(torch.int8)
            tensors["weight_zero_point"] = packed if is_packed else plain
        return tensors, scales[:, group_of] * (n - zeros[:, group_of])

    return quantize
