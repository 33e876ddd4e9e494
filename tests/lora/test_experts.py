"""Adapters of experts, each with tensors of its own, beside transformers with the same sums in its stacked weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.breadth import pick
from tests.lora.adapters import ATTENTION, ref_of, save_adapter
from tests.lora.test_exactness import MODELS, make_pool
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import TOLERANCE, random_tokens, reference_logits

from octavo.contracts.schedule import SlotFill
from octavo.errors import AdapterError

RANK, SCALE = 3, 2.0
EXPERTS = "model.layers.{}.mlp.experts"


def adapt_experts(reference: Any, folder: Path) -> None:
    """Save an adapter of some experts of all layers, and merge it into transformers' model."""
    tensors, generator = {}, torch.Generator().manual_seed(5)
    for layer, block in enumerate(reference.model.layers):
        stacks = {"gate_proj": block.mlp.experts.gate_up_proj, "down_proj": block.mlp.experts.down_proj}
        for expert in range(1, reference.config.num_experts):
            for part, stack in stacks.items():
                size = reference.config.moe_intermediate_size if part == "gate_proj" else stack.shape[1]
                down = 0.2 * torch.randn(RANK, stack.shape[2], generator=generator)
                up = 0.2 * torch.randn(size, RANK, generator=generator)
                name = f"base_model.model.{EXPERTS.format(layer)}.{expert}.{part}"
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
                with torch.no_grad():
                    stack[expert, :size] += SCALE * up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("name", pick(["qwen2-moe"], ["qwen2-moe", "qwen3-moe"]))
def test_experts_with_adapters(name: str, tmp_path: Path) -> None:
    MODELS[name].save(tmp_path / "base")
    model, prompt = load(tmp_path / "base"), random_tokens(15, seed=2)
    of_experts, plain = MODELS[name].build(), MODELS[name].build()
    adapt_experts(of_experts, tmp_path / "experts")
    of_attention = save_adapter(MODELS[name].build(), tmp_path / "attention", target_modules=ATTENTION)
    pool = make_pool(model, num_slots=2, experts=True)
    for slot, kind in enumerate(("experts", "attention")):
        pool.load(ref_of(tmp_path / kind))
        pool.fill([SlotFill(slot=slot, content_hash=ref_of(tmp_path / kind).content_hash)])
    runner = PagedRunner(model)
    runner.adapter_slots = {0: 0, 1: 1}
    for found, reference in zip(
        runner.step({0: prompt, 1: prompt, 2: prompt}), (of_experts, of_attention, plain), strict=True
    ):
        torch.testing.assert_close(found, reference_logits(reference, prompt), atol=TOLERANCE * 4, rtol=0)


def test_experts_have_slots_only_if_asked_for(tmp_path: Path) -> None:
    MODELS["qwen3-moe"].save(tmp_path / "base")
    adapt_experts(MODELS["qwen3-moe"].build(), tmp_path / "experts")
    with pytest.raises(AdapterError, match="lora_experts"):
        make_pool(load(tmp_path / "base")).load(ref_of(tmp_path / "experts"))
