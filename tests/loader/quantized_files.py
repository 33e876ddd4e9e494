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
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
Tensors = dict[str, torch.Tensor]
# From a weight [N, K] to what a file has of it, by endings of names, and to the dense weight that this stands for.
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def save_pair(
    folder: Path,
    settings: dict[str, Any],
    is_quantized: Callable[[str], bool],
    quantize: Quantize,
    family: str = "Qwen3",
    **sizes: int,
) -> None:
    """Save a tiny model to folder/dense in float32, and to folder/quantized with `settings` as its configuration."""
    TinyModel(name="quantized", family=family, settings=SIZES | sizes).save(folder / "dense")
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
    """Return what writes GPTQ's tensors; with `has_order`, groups are not made of neighbors."""

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


_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs of a word, from its lowest bits


def awq(group_size: int) -> Quantize:
    """Return what writes AWQ's tensors: words along the outputs, in AWQ's order."""

    def to_awq_words(integers: torch.Tensor) -> torch.Tensor:
        """Put [R, outputs] into [R, outputs / 8]."""
        return to_words(integers.reshape(len(integers), -1, 8)[..., _AWQ_ORDER].flatten(1), 4)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        group_of = torch.arange(weight.shape[1]) // group_size
        n, scales, zeros = rounded(weight, 4, group_of, is_symmetric=False)
        tensors = {"qweight": to_awq_words(n.T), "qzeros": to_awq_words(zeros.T), "scales": scales.T.half()}
        return tensors, scales[:, group_of] * (n - zeros[:, group_of])

    return quantize


def float8(block: tuple[int | None, int | None], name: str, shape: tuple[int, ...] | None = None) -> Quantize:
    """Return what writes 8-bit floats with a scale for each block of outputs and inputs; `shape` is that of scales."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, inputs = block[0] or len(weight), block[1] or weight.shape[1]
        row_of, group_of = torch.arange(len(weight)) // rows, torch.arange(weight.shape[1]) // inputs
        scales = torch.zeros(int(row_of.max()) + 1, int(group_of.max()) + 1)
        for row in range(scales.shape[0]):
            for group in range(scales.shape[1]):
                scales[row, group] = weight[row_of == row][:, group_of == group].abs().max() / 448.0
        of_all = scales[row_of][:, group_of]
        values = (weight / of_all).to(torch.float8_e4m3fn)
        found = scales if shape is None else scales.reshape(shape)
        return {"weight": values, name: found}, of_all * values.float()

    return quantize
