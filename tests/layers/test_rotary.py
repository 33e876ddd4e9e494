"""Rotary frequencies equal those of transformers at real sizes; the table's bits depend on the position alone."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from octavo.config.layers import RopeConfig
from octavo.layers.rotary import RotaryEmbedding, inverse_frequencies

HEAD_DIM = 128
CPU = torch.device("cpu")

# Ours, and what transformers' configuration says for the same. Sizes are those of published checkpoints.
CASES: list[tuple[RopeConfig, dict[str, Any]]] = [
    (RopeConfig(theta=1e6), {"rope_type": "default"}),
    (
        RopeConfig(theta=1e6, kind="linear", factor=4.0, original_max_position=4096),
        {"rope_type": "linear", "factor": 4.0},
    ),
    (
        RopeConfig(theta=1e4, kind="dynamic", factor=2.0, original_max_position=4096),
        {"rope_type": "dynamic", "factor": 2.0},
    ),
    (
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    (
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        RopeConfig(theta=1e4, kind="yarn", factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=0.8),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    (
        RopeConfig(theta=1e4, kind="yarn", factor=16.0, original_max_position=64, truncate=False, beta_fast=64.0),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
            "beta_fast": 64.0,
        },
    ),
    (
        # Both ends of the blend lie beyond the last index.
        RopeConfig(theta=2.0, kind="yarn", factor=2.0, original_max_position=10**9),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**9},
    ),
]


def reference(rope: RopeConfig, parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=rope.original_max_position or 4096,
        rope_parameters={**parameters, "rope_theta": rope.theta},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("rope", "parameters"), CASES, ids=lambda case: getattr(case, "kind", ""))
def test_frequencies_and_table_equal_those_of_transformers(rope: RopeConfig, parameters: dict[str, Any]) -> None:
    theirs = reference(rope, parameters)
    frequencies, attention_factor = inverse_frequencies(rope, HEAD_DIM)
    # Two float32 operations in another order: a few units in the last place.
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=5e-7, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)

    positions = torch.tensor([0, 1, 7, 63, 900])
    cos, sin = RotaryEmbedding(rope, HEAD_DIM, 901, device=CPU)(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    # 900 positions times 5e-7 of a frequency below one.
    torch.testing.assert_close(cos, their_cos[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-4)
    torch.testing.assert_close(sin, their_sin[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-4)


def test_kinds_differ() -> None:
    """The comparison above could not tell kinds apart if they were all alike."""
    frequencies = [inverse_frequencies(rope, HEAD_DIM)[0] for rope, _ in CASES if rope.kind != "dynamic"]
    for index, one in enumerate(frequencies):
        assert all((one - other).abs().max() > 1e-3 * one.min() for other in frequencies[index + 1 :])


def test_bits_depend_on_the_position_alone() -> None:
    rope = CASES[4][0]
    cos, sin = RotaryEmbedding(rope, HEAD_DIM, 1000, device=CPU)(torch.arange(1000))
    for length in (1, 3, 17, 33):
        short_cos, short_sin = RotaryEmbedding(rope, HEAD_DIM, length, device=CPU)(torch.arange(length))
        assert torch.equal(short_cos, cos[:length])
        assert torch.equal(short_sin, sin[:length])


def test_sections_turn_by_their_own_axes_as_in_qwen2_vl() -> None:
    sections = (16, 24, 24)
    config = Qwen2VLTextConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)},
    )
    positions = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = Qwen2VLRotaryEmbedding(config)(torch.empty(0), positions[:, None])
    ours = RotaryEmbedding(RopeConfig(theta=1e6, sections=sections), HEAD_DIM, 300, device=CPU)
    for one, other in zip(ours(positions), expected, strict=True):
        torch.testing.assert_close(one, other[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-5)
    text = torch.arange(40)  # all three axes alike: as without sections
    for one, other in zip(ours(text.expand(3, -1)), ours(text), strict=True):
        assert torch.equal(one, other)
