"""GGUF files of models that keep states say what the checkpoints say that llama.cpp's converter makes them from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from tests.breadth import pick
from tests.models.paged import PagedRunner, load
from tests.models.test_exactness import random_tokens
from tests.models.tiny import MAX_LEN, TinyModel, by_name

from octavo.kernels.dispatch import native_kernels

Array = npt.NDArray[Any]
Tensors = Iterator[tuple[str, Array]]


@dataclass(frozen=True, kw_only=True)
class Written:
    """How a family's checkpoint is written."""

    architecture: str
    settings: Callable[[Any], dict[str, Any]]  # the architecture's own keys, of transformers' configuration
    parts: dict[str, str]  # by the end of a name behind the layer's number
    outside: dict[str, str]
    tensors: Callable[[Any, str, Array], Tensors] = lambda config, part, values: iter(((part, values),))
    norm_offset: float = 0.0  # of norms but those behind recurrences: files have whole factors


def write(folder: Path, path: Path, of: Written, config: Any, kind: str = "F32") -> Path:
    """Write the checkpoint in `folder` as llama.cpp's converter would."""
    writer, quant = gguf.GGUFWriter(path, of.architecture), gguf.GGMLQuantizationType[kind]
    shared = {
        "context_length": MAX_LEN,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.layer_norm_rms_epsilon": float(_first_of(config, "norm_eps", "rms_norm_eps", "layer_norm_epsilon")),
    }
    for key, value in {**shared, **of.settings(config)}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{of.architecture}.{key}", value)
    for name, values in _unstacked(load_file(folder / "model.safetensors")):
        _, _, behind = name.partition("layers.")
        layer, _, end = behind.partition(".")
        targets: Tensors = iter(((of.outside.get(name, ""), values),))
        if behind:
            part = next(part for key, part in of.parts.items() if end == key or end.startswith(f"{key}."))
            suffix = "" if part.endswith(("ssm_a", "ssm_d", ".bias")) else f".{name.rpartition('.')[2]}"
            targets = ((f"blk.{layer}.{part}{suffix}", values) for part, values in of.tensors(config, part, values))
        for target, array in targets:
            assert target, name
            is_matrix = array.ndim > 1 and not any(part in target for part in ("conv", "ssm_a", "ssm_d", "norm"))
            has_offset = target.endswith("norm.weight") and "ssm_norm" not in target
            whole = np.ascontiguousarray(array + np.float32(of.norm_offset) if has_offset else array)
            data = quantize(whole, quant) if is_matrix else whole
            writer.add_tensor(target, data, raw_dtype=quant if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _first_of(config: Any, *names: str) -> Any:
    return next(getattr(config, name) for name in names if hasattr(config, name))


def _unstacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, Array]]:
    """Yield tensors; those of experts one by one become stacks."""
    stacks: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        before, _, behind = name.partition(".experts.")
        number, _, end = behind.partition(".")
        if number.isdigit():
            stacks.setdefault(f"{before}.experts.{end}", {})[int(number)] = tensor.numpy()
        else:
            yield name, tensor.numpy()
    for name, experts in stacks.items():
        yield name, np.stack([experts[number] for number in sorted(experts)])


def _heads_of_pairs(values: Array, num_heads: int) -> Array:
    """Return rows of queries or keys as files of Llama's kin have them: halves of each head take turns."""
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _lfm2_settings(config: Any) -> dict[str, Any]:
    sizes = {"feed_forward_length": 72}
    if hasattr(config, "moe_intermediate_size"):
        sizes = {
            "feed_forward_length": config.intermediate_size,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
        }
    kinds = config.layer_types
    return {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads if kind != "conv" else 0 for kind in kinds],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "shortconv.l_cache": config.conv_L_cache,
        **sizes,
    }


def _lfm2_tensors(config: Any, part: str, values: Array) -> Tensors:
    if part == "ffn_gate_up_exps":
        gate, up = np.split(values, 2, axis=1)
        yield from (("ffn_gate_exps", gate), ("ffn_up_exps", up))
    else:
        yield part, values[:, 0] if part == "shortconv.conv" else values


LFM2 = Written(
    architecture="lfm2",
    settings=_lfm2_settings,
    parts={
        "operator_norm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj", "ffn_norm": "ffn_norm", "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up", "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.expert_bias": "exp_probs_b.bias", "feed_forward.experts.gate_up_proj": "ffn_gate_up_exps",
        "feed_forward.experts.down_proj": "ffn_down_exps", "feed_forward.experts.w1": "ffn_gate_exps",
        "feed_forward.experts.w3": "ffn_up_exps", "feed_forward.experts.w2": "ffn_down_exps",
    },
    outside={"model.embed_tokens.weight": "token_embd.weight", "model.embedding_norm.weight": "token_embd_norm.weight"},
    tensors=_lfm2_tensors,
)  # fmt: skip


def _mamba2_tensors(part: str, values: Array, num_groups: int) -> Tensors:
    if part == "ssm_a":
        values = -np.exp(values)[:, None]
    elif part == "ssm_d":
        values = values[:, None]
    elif part == "ssm_norm":
        values = values.reshape(num_groups, -1)
    elif part == "ssm_conv1d" and values.ndim == 3:
        values = values[:, 0]
    yield part, values


def _granite_settings(config: Any) -> dict[str, Any]:
    has_experts = config.num_local_experts > 0
    experts = {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
    }
    kinds = config.layer_types
    return {
        "feed_forward_length": config.intermediate_size if has_experts else config.shared_intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds],
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
        **(experts if has_experts else {}),
    }


def _granite_tensors(config: Any, part: str, values: Array) -> Tensors:
    if part in ("attn_q", "attn_k"):
        count = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        yield part, _heads_of_pairs(values, count)
    elif part in ("input_linear", "shared_input"):
        stem = "exps" if part == "input_linear" else "shexp" if config.num_local_experts else ""
        gate, up = np.split(values, 2, axis=-2)
        yield from ((f"ffn_{name}_{stem}".rstrip("_"), of) for name, of in (("gate", gate), ("up", up)))
    elif part == "shared_output":
        yield "ffn_down_shexp" if config.num_local_experts else "ffn_down", values
    else:
        yield from _mamba2_tensors(part, values, config.mamba_n_groups)


GRANITE = Written(
    architecture="granitehybrid",
    settings=_granite_settings,
    parts={
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
        "mamba.dt_bias": "ssm_dt.bias", "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
        "block_sparse_moe.input_linear": "input_linear", "block_sparse_moe.output_linear": "ffn_down_exps",
        "block_sparse_moe.router.layer": "ffn_gate_inp", "shared_mlp.input_linear": "shared_input",
        "shared_mlp.output_linear": "shared_output",
    },
    outside={
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
    tensors=_granite_tensors,
)  # fmt: skip
# Heads in files of Granite are of hidden size / heads; nothing rotates if a layer keeps a state.
_GRANITE: dict[str, Any] = {"head_dim": 6, "position_embedding_type": None}


def _mamba2_settings(config: Any) -> dict[str, Any]:
    num_heads = _first_of(config, "mamba_num_heads", "mamba_n_heads", "num_heads")
    return {
        "ssm.conv_kernel": _first_of(config, "conv_kernel", "mamba_d_conv"),
        "ssm.state_size": _first_of(config, "ssm_state_size", "mamba_d_state", "state_size"),
        "ssm.group_count": _first_of(config, "n_groups", "mamba_n_groups"),
        "ssm.inner_size": num_heads * _first_of(config, "mamba_head_dim", "mamba_d_head", "head_dim"),
        "ssm.time_step_rank": num_heads,
    }


def _nemotron_settings(config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    size = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    experts = {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
        **({"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}),
    }
    return {
        "feed_forward_length": [size if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": 84,  # of nothing
        **_mamba2_settings(config),
        **(experts if "moe" in kinds else {}),
    }


NEMOTRON = Written(
    architecture="nemotron_h_moe",
    settings=_nemotron_settings,
    parts={
        "norm": "attn_norm", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
        "mixer.o_proj": "attn_output", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d",
        "mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.dt_bias": "ssm_dt.bias", "mixer.norm": "ssm_norm",
        "mixer.out_proj": "ssm_out", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias", "mixer.gate": "ffn_gate_inp",
        "mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps",
        "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
        "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    outside={
        "backbone.embeddings.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
    tensors=lambda config, part, values: _mamba2_tensors(part, values, config.n_groups),
)  # fmt: skip


def _falcon_settings(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **_mamba2_settings(config),
    }


def _falcon_tensors(config: Any, part: str, values: Array) -> Tensors:
    """Yield weights times their multipliers."""
    before, mlp = config.attention_in_multiplier, config.mlp_multipliers
    factors = {
        "attn_q": before,
        "attn_k": before * config.key_multiplier,
        "attn_v": before,
        "attn_output": config.attention_out_multiplier,
        "ssm_out": config.ssm_out_multiplier,
        "ffn_gate": mlp[0],
        "ffn_down": mlp[1],
    }
    if part == "ssm_in":
        keys = config.mamba_n_groups * config.mamba_d_state
        sizes = config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads
        values = values * config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None]
    yield from _mamba2_tensors(part, (values * factors.get(part, 1.0)).astype(np.float32), config.mamba_n_groups)


FALCON = Written(
    architecture="falcon-h1",
    settings=_falcon_settings,
    parts={
        "input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
        "mamba.dt_bias": "ssm_dt.bias", "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
        "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
    },
    outside={
        "model.embed_tokens.weight": "token_embd.weight", "model.final_layernorm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
    tensors=_falcon_tensors,
)  # fmt: skip
MAMBA2 = replace(
    NEMOTRON,
    architecture="mamba2",
    settings=lambda config: {
        "context_length": 1 << 20,
        "attention.head_count": 0,
        "feed_forward_length": 0,
        **_mamba2_settings(config),
    },
)


def _next_settings(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "feed_forward_length": config.intermediate_size,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def _next_tensors(config: Any, part: str, values: Array) -> Tensors:
    if part == "qkvz":
        key, each = config.linear_key_head_dim, values.shape[0] // config.linear_num_key_heads
        value = each // 2 - key
        by_head = values.reshape(-1, each, values.shape[1])
        parts = np.split(by_head, [key, 2 * key, 2 * key + value], axis=1)
        q, k, v, z = (of.reshape(-1, values.shape[1]) for of in parts)
        yield from (("attn_qkv", np.concatenate((q, k, v))), ("attn_gate", z))
    elif part == "ssm_a":
        yield part, -np.exp(values)
    elif part == "ssm_conv1d":
        yield part, values[:, 0]
    elif part == "ffn_gate_up_exps":
        gate, up = np.split(values, 2, axis=1)
        yield from (("ffn_gate_exps", gate), ("ffn_up_exps", up))
    else:
        yield part, values


NEXT = Written(
    architecture="qwen3next",
    settings=_next_settings,
    outside={
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    },
    parts={
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
        **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
        "self_attn.o_proj": "attn_output",
        "linear_attn.in_proj_qkvz": "qkvz",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
        **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
        **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    },
    tensors=_next_tensors,
    norm_offset=1.0,
)
CASES: dict[str, tuple[Written, dict[str, Any]]] = {
    "nemotron-h": (NEMOTRON, {"n_group": 1, "topk_group": 1}),
    "nemotron-h-latent": (NEMOTRON, {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}),
    "falcon-h1": (
        FALCON,
        {"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "mamba_norm_before_gate": False},
    ),
    "mamba2": (MAMBA2, {"num_hidden_layers": 2}),
    "qwen3-next": (NEXT, {"decoder_sparse_step": 1, "norm_topk_prob": True}),
    "lfm2": (LFM2, {}),
    "lfm2-moe": (replace(LFM2, architecture="lfm2moe"), {"routed_scaling_factor": 1.0}),
    "granite-hybrid": (GRANITE, _GRANITE),
    "granite-hybrid-dense": (GRANITE, {**_GRANITE, "mamba_proj_bias": False}),
}
EVEN = {  # whole blocks of 32
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "block_multiple_of": 72,
}  # fmt: skip


@pytest.mark.parametrize("name", pick([name for name in CASES if not by_name(name).is_variant], list(CASES)))
def test_as_the_checkpoint(name: str, tmp_path: Path) -> None:
    of, changes = CASES[name]
    case = TinyModel(name=name, family=by_name(name).family, settings={**by_name(name).settings, **changes})
    file = write(tmp_path, tmp_path / "model.gguf", of, case.save(tmp_path).config)
    tokens = random_tokens(30, seed=1)
    [expected], [found] = (PagedRunner(load(path)).step({0: tokens}) for path in (tmp_path, file))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(native_kernels() is None, reason="only the C++ kernels compute with blocks")
def test_quantized(tmp_path: Path) -> None:
    """Projections of one tensor are computed in blocks."""
    settings = {
        **by_name("granite-hybrid-dense").settings,
        **_GRANITE,
        **EVEN,
        "head_dim": 16,
        "mamba_proj_bias": False,
    }
    settings |= {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 30, "shared_intermediate_size": 64}
    config = TinyModel(name="even", family="GraniteMoeHybrid", settings=settings).save(tmp_path).config
    file = write(tmp_path, tmp_path / "model.gguf", GRANITE, config, "Q8_0")
    tokens = random_tokens(30, seed=2)
    models = [load(path, dtype="bfloat16") for path in (tmp_path, file)]
    assert models[1].layers["1"].attention.rows.scheme.name == "gguf Q8_0"  # type: ignore[union-attr]
    [expected], [found] = (PagedRunner(model).step({0: tokens}) for model in models)
    assert torch.nn.functional.cosine_similarity(found, expected).mean() > 0.99
