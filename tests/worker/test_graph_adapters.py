"""Recorded steps with adapters: the bits of steps run op by op, of rows alone, and of rows without adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breadth import each
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import random_tokens
from tests.models.tiny import TINY_MODELS

from octavo.kernels.dispatch import native_kernels
from octavo.layers.linear import MergedLinear
from octavo.models.interfaces import CausalLM

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels are recorded")

PROMPTS = {request: random_tokens(length, seed=request) for request, length in enumerate((1, 9, 5, 7))}
SLOTS = {0: 1, 1: 0, 3: 1}  # request 2 has no adapter
OPTIONS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
]


def model_with_adapters(name: str, folder: Path, options: dict[str, Any]) -> CausalLM:
    """Fill the slots of all linears with random adapters, of ranks 3 and 8; the first leaves out every other linear."""
    next(case for case in TINY_MODELS if case.name == name).save(folder)
    model, source = load(folder, **options), torch.Generator().manual_seed(5)
    context, layers = model.context, [layer for name, layer in model.named_modules() if name.startswith("layers.")]
    for index, layer in enumerate(layer for layer in layers if isinstance(layer, MergedLinear)):
        sizes = tuple(share.size for share in layer.parts.values())
        slots = context.kernels.empty_lora(2, 8, layer.inputs.size, sizes, dtype=context.dtype, device=context.device)
        for tensor in (slots.down, slots.up):
            tensor.copy_(torch.randn(tensor.shape, generator=source) * 0.2)
        slots.ranks.copy_(torch.tensor([3 * (index % 2), 8]))
        layer.adapters = slots
    return model


def logits_of(
    model: CausalLM, requests: list[int], *, is_recorded: bool, has_adapters: bool = True
) -> dict[int, torch.Tensor]:
    """Return each request's logits of the last token of its prompt, and of a token that follows."""
    runner = PagedRunner(model)
    runner.adapter_slots = {request: slot for request, slot in SLOTS.items() if has_adapters and request in requests}
    if is_recorded:
        runner.record(40)
    prompts, found = {request: PROMPTS[request] for request in requests}, []
    ends = torch.tensor([len(prompt) for prompt in prompts.values()]).cumsum(0) - 1
    found.append(runner.step_for(prompts, ends.tolist()).clone())
    found.append(runner.step_for({request: [7] for request in requests}, None))
    return {request: torch.stack([step[at] for step in found]) for at, request in enumerate(requests)}


@each("options", OPTIONS)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_recorded_with_adapters(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, everybody = model_with_adapters(name, tmp_path, options), [*PROMPTS]
    recorded = logits_of(model, everybody, is_recorded=True)
    eager = logits_of(model, everybody, is_recorded=False)
    plain = logits_of(model, everybody, is_recorded=True, has_adapters=False)
    for request in everybody:
        assert torch.equal(recorded[request], eager[request])
        assert torch.equal(recorded[request], logits_of(model, [request], is_recorded=True)[request])
        assert torch.equal(recorded[request], plain[request]) is (request not in SLOTS)
