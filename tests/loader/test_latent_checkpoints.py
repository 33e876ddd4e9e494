"""Checkpoints of models with latent attention: quantized ones compute what they stand for, heads by all ranks.

How heads read the latent vector is computed dense, whatever the file has.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import run_ranks
from tests.loader.quantized_files import Quantize, float8, gptq, save_pair
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import random_tokens

from octavo.distributed.groups import ParallelGroups
from octavo.errors import CheckpointError

TOKENS = random_tokens(30, seed=1)
SIZES: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 48,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
FLOATS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
INTEGERS = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}


def logits_of(folder: Path, groups: ParallelGroups | None = None) -> torch.Tensor:
    model = load(folder, groups=groups)
    return PagedRunner(model).step({0: TOKENS})[0]


@pytest.mark.parametrize(
    ("settings", "quantize"),
    [(FLOATS, float8((32, 32), "weight_scale_inv")), (INTEGERS, gptq(4, 16, is_symmetric=True))],
    ids=["blocks of 8-bit floats", "4-bit integers"],
)
def test_a_quantized_one_is_what_it_stands_for(settings: dict[str, Any], quantize: Quantize, tmp_path: Path) -> None:
    save_pair(tmp_path, settings, lambda layer: True, quantize, "DeepseekV3", **SIZES)
    stored = load_file(tmp_path / "quantized" / "model.safetensors")
    assert any(name.endswith(("kv_b_proj.weight_scale_inv", "kv_b_proj.qweight")) for name in stored)
    expected = logits_of(tmp_path / "dense")
    torch.testing.assert_close(logits_of(tmp_path / "quantized"), expected, atol=2e-4, rtol=0)
    for of_rank in run_ranks(lambda groups: logits_of(tmp_path / "quantized", groups), 2):
        torch.testing.assert_close(of_rank, expected, atol=2e-4, rtol=0)


def test_heads_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_pair(tmp_path, FLOATS, lambda layer: False, float8((32, 32), "weight_scale_inv"), "DeepseekV3", **SIZES)
    expected, file = logits_of(tmp_path / "dense"), tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    more = {f"model.layers.3.{name}.weight": torch.zeros(4, 4) for name in ("eh_proj", "self_attn.kv_b_proj")}
    save_file({**tensors, **more}, file, metadata={"format": "pt"})
    assert torch.equal(logits_of(tmp_path / "dense"), expected)
    save_file({**tensors, "model.layers.1.eh_proj.weight": torch.zeros(4, 4)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model.layers.1.eh_proj.weight' has no place"):
        logits_of(tmp_path / "dense")
