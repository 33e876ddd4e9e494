"""What the settings of gpt-oss mean: of published checkpoints, those that files leave out, those that are refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from octavo.config.hf import read_model_config
from octavo.config.layers import ExpertsSpec
from octavo.config.model import ModelConfig
from octavo.errors import CheckpointError, InvalidParameterError, UnsupportedModelError

# As openai/gpt-oss-20b has it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}


def read(folder: Path, config: dict[str, Any], **options: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder, model="m", **options)


def test_a_published_checkpoint(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    first = config.attention(0)
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (64, 8, 64)
    assert first.has_sinks
    assert first.has_bias
    assert first.has_out_bias
    assert config.sliding_windows == (128, None) * 12
    rope = config.rotary[0].rope
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert config.max_model_len == 131072
    experts = config.layers[0].feed_forward
    assert experts == ExpertsSpec(
        num_experts=32,
        top_k=4,
        intermediate_size=2880,
        renormalizes=True,
        has_bias=True,
        has_router_bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    )
    assert config.quantization is not None
    assert config.quantization.method == "mxfp4"
    assert read(tmp_path, PUBLISHED, dtype="float32").quantization is None  # blocks are dequantized at load


def test_absent_keys_are_transformers_defaults(tmp_path: Path) -> None:
    config, theirs = read(tmp_path, {"model_type": "gpt_oss", "num_hidden_layers": 5}), transformers.GptOssConfig()
    experts = config.experts
    assert experts is not None
    assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (experts.num_experts, experts.top_k) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert (experts.swiglu_limit, experts.swiglu_alpha) == (theirs.swiglu_limit, theirs.swiglu_alpha)
    attention = config.attention(0)
    assert attention.num_heads == theirs.num_attention_heads
    assert (attention.num_kv_heads, attention.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert config.sliding_windows == (128, None, 128, None, 128)
    rope = config.rotary[0].rope
    assert (rope.kind, rope.theta, rope.truncate) == ("yarn", theirs.rope_parameters["rope_theta"], False)
    assert config.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ({"swiglu_limit": -1.0}, CheckpointError, "swiglu_limit=-1.0"),
        ({"num_experts_per_tok": 33}, CheckpointError, "num_experts_per_tok=33"),
        ({"layer_types": ["sliding_attention"]}, CheckpointError, "layer_types: 24 entries are expected"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    change: dict[str, Any], error: type[Exception], names: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=names):
        read(tmp_path, {**PUBLISHED, **change})


def test_what_gguf_files_leave_out(tmp_path: Path) -> None:
    settings = {
        "context_length": 131072, "embedding_length": 64, "feed_forward_length": 96, "block_count": 3,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128,
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64, "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    for key, value in settings.items():
        writer.add_key_value(f"gpt-oss.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_token_list(["<|start|>", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32))
    writer.add_tensor("output.weight", np.zeros((5, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = read_model_config(tmp_path / "model.gguf", model="m")
    assert config.sliding_windows == (128, None, 128)
    assert not config.rotary[0].rope.truncate
    assert config.experts is not None
    assert (config.experts.intermediate_size, config.experts.swiglu_limit) == (64, 7.0)
    assert config.eos_token_ids == (1, 3, 4)  # the end of a message is none of an answer


def test_mxfp4_may_be_dequantized_or_quantized_again(tmp_path: Path) -> None:
    from octavo.config.hf_quantization import resolve_quantization

    config = read(tmp_path, PUBLISHED)
    assert resolve_quantization(None, config, tmp_path) == (None, config)
    in_float32 = read(tmp_path, PUBLISHED, dtype="float32")
    assert resolve_quantization("dequantize", in_float32, tmp_path) == (None, in_float32)
    for asked, resolved in (("dequantize", None), ("int8", "int8")):
        found, model = resolve_quantization(asked, config, tmp_path)  # type: ignore[arg-type]
        assert (found, model.quantization) == (resolved, None)
    with pytest.raises(InvalidParameterError, match=r"quantization='gguf'.*needs a GGUF file"):
        resolve_quantization("gguf", config, tmp_path)
