"""The table of tiny models, one row per architecture and setting, with sizes chosen to be awkward.

transformers builds and saves them; Octavo reads what it saved. Sizes are no multiples of 8, heads are apart from
hidden / heads, and weights are large enough that every part (biases, norms, windows, scalings) shows in the logits.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tests.breadth import RUNS_ALL

VOCAB_SIZE = 97
MAX_LEN = 64

_ODD = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# transformers' names, where they are not the family's.
_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Llama4": "Llama4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
# Families that store norms' weights minus one, but for those of linear attention.
_STORED_MINUS_ONE = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Nemotron", "MuseGlimmer")
_WITH_STATES = ("Qwen3Next", "Qwen3_5", "Lfm", "GraniteMoeHybrid", "NemotronH", "FalconH1", "Mamba2")
# Behind a tower for images, which is left out.
_WITH_TOWER = {
    "MuseGlimmer": {
        "vision_config": {"hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1},
        "out_hidden_size": 32,
        "projector_hidden_size": 4,
    }
}
_MULTI_HEAD = {"num_key_value_heads": 6}
_ONE_KV_HEAD_OF_8 = {"hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6}
_THREE_KV_HEADS = {"num_key_value_heads": 3}
_EIGHT_KV_HEADS = {"hidden_size": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 6}
_GEMMA3 = {"sliding_window_pattern": 2, "pad_token_id": 0}
_GEMMA4 = {
    "pad_token_id": 0,
    "num_key_value_heads": 3,
    "global_head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 5.0,
}
_GEMMA4_SHARED = {
    "hidden_size_per_layer_input": 7,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 21,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1],
    "long_factor": [1.5, 4.0],
    "original_max_position_embeddings": 16,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
    "attention_multiplier": 0.2,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 27}
_GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_parameters": {**_YARN, "truncate": False},
    "swiglu_limit": 0.9,  # that some gates and ups are beyond
    "swiglu_alpha": 1.3,
}
_HYBRID = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 21,
    "routed_scaling_factor": 1.5,
}
_LATENT_GLM = {**{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"}, "rms_norm_eps": 1e-5}
_GROUPS = {"n_group": 3, "topk_group": 2}
_SHORT_CONV = {"layer_types": ["conv", "full_attention", "conv"], "intermediate_size": 100, "block_multiple_of": 8}
_LFM3_KINDS = ["conv", "sliding_attention", "full_attention"]
_MAMBA2 = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 6,
    "mamba_d_state": 10,
    "mamba_d_head": 12,
    "mamba_n_groups": 3,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 27,
    **_MULTIPLIERS,
}
_BRANCHES = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 3,
    "ssm_state_size": 10,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
    "moe_shared_expert_intermediate_size": 27,
    "routed_scaling_factor": 1.5,
}
_BESIDE = {
    "mamba_d_ssm": 42,
    "mamba_n_heads": 6,
    "mamba_d_head": 7,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_rms_norm": True,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 1.7,
    "mlp_multipliers": [0.6, 1.4],
    "key_multiplier": 1.3,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.1,
    "ssm_multipliers": [0.9, 1.2, 0.7, 1.4, 1.6],
}
_MAMBA2_ALONE = {"num_heads": 6, "head_dim": 12, "state_size": 10, "n_groups": 3}
_HALF = {"head_dim": 12}  # of which half is rotated
_HEADS_OF_8 = {"hidden_size": 48, "head_dim": 8}
_LEADING = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 21,
    "routed_scaling_factor": 1.5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """One row: a family of transformers and what differs from the odd sizes above."""

    name: str
    family: str  # prefix of transformers' classes
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4  # between logits that reach 7: both sides err
    is_variant: bool = False  # of a family that another row has: only `make test-all` tries it

    @property
    def keeps_states(self) -> bool:
        """Whether some of its layers keep a state: prefixes are found at the ends of longer blocks only."""
        return self.family.startswith(_WITH_STATES)

    def build(self, seed: int = 0) -> Any:
        """Return transformers' model in float32, with random weights."""
        name, ending = _CONFIGS.get(self.family, self.family + "Config"), "ForCausalLM"
        settings: dict[str, Any] = {**_ODD, **self.settings}
        if self.family in _WITH_TOWER:
            settings, ending = {"text_config": settings, **_WITH_TOWER[self.family]}, "ForConditionalGeneration"
        config = getattr(transformers, name)(**settings)
        config._attn_implementation = config._experts_implementation = "eager"  # others have no odd sizes
        model = getattr(transformers, self.family + ending)(config).eval()
        for module in model.modules():
            if hasattr(module, "time_step_limit"):  # which Nemotron-H's does not take from its configuration
                module.time_step_limit = (0.0, math.inf)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                is_whole = self.family not in _STORED_MINUS_ONE or "linear_attn.norm" in name
                centre = 1.0 if ("norm" in name or "scale" in name) and is_whole else 0.0
                parameter.copy_(centre + 0.3 * noise if "norm" in name or "scale" in name else 0.25 * noise)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.copy_(0.7 + 0.1 * torch.rand(buffer.shape, generator=generator))
                if name.endswith(("e_score_correction_bias", "expert_bias")):  # some corrected scores are negative
                    buffer.copy_(torch.randn(buffer.shape, generator=generator) - 0.5)
        return model

    def save(self, folder: Path, seed: int = 0) -> Any:
        """Save a checkpoint to `folder` and return transformers' model of it."""
        model = self.build(seed)
        model.save_pretrained(folder)
        return model


_ALL = [
    TinyModel(name="llama", family="Llama"),
    TinyModel(name="llama-multi-head", family="Llama", settings=_MULTI_HEAD),
    TinyModel(name="llama-gqa-8", family="Llama", settings=_ONE_KV_HEAD_OF_8),
    TinyModel(name="llama-gqa-2-of-6", family="Llama", settings=_THREE_KV_HEADS),
    TinyModel(name="llama-derived-head-dim", family="Llama", settings={"head_dim": None}),
    TinyModel(name="llama-tied", family="Llama", settings={"tie_word_embeddings": True}),
    TinyModel(name="llama-biases", family="Llama", settings={"attention_bias": True, "mlp_bias": True}),
    TinyModel(
        name="llama-linear",
        family="Llama",
        settings={"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}},
    ),
    TinyModel(
        name="llama-dynamic",
        family="Llama",
        settings={"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}},
    ),
    TinyModel(name="llama-3.1", family="Llama", settings={"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5}),
    TinyModel(name="llama-yarn", family="Llama", settings={"rope_parameters": _YARN}),
    TinyModel(
        name="llama-yarn-mscale",
        family="Llama",
        settings={"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}},
    ),
    TinyModel(
        name="llama-yarn-attention-factor",
        family="Llama",
        settings={"rope_parameters": {**_YARN, "attention_factor": 0.8, "beta_fast": 8.0, "beta_slow": 0.5}},
    ),
    TinyModel(name="mistral", family="Mistral", settings={"sliding_window": None}),
    TinyModel(name="mistral-window", family="Mistral", settings={"sliding_window": 7}),
    TinyModel(name="mistral-window-gqa-8", family="Mistral", settings={"sliding_window": 1, **_ONE_KV_HEAD_OF_8}),
    TinyModel(name="qwen2", family="Qwen2", settings={"tie_word_embeddings": True}),
    TinyModel(
        name="qwen2-windows",
        family="Qwen2",
        settings={"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
    ),
    TinyModel(name="qwen2-yarn", family="Qwen2", settings={"rope_parameters": _YARN, **_MULTI_HEAD}),
    TinyModel(name="qwen3", family="Qwen3"),
    TinyModel(name="qwen3-tied-gqa-8", family="Qwen3", settings={"tie_word_embeddings": True, **_ONE_KV_HEAD_OF_8}),
    TinyModel(name="qwen3-gqa-2-of-16", family="Qwen3", settings=_EIGHT_KV_HEADS),
    TinyModel(name="qwen3-biases", family="Qwen3", settings={"attention_bias": True}),
    TinyModel(
        name="qwen3-mixed-windows",
        family="Qwen3",
        settings={
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    TinyModel(
        name="gemma3",
        family="Gemma3",
        settings={**_GEMMA3, "sliding_window": 6, "query_pre_attn_scalar": 7, "tie_word_embeddings": True},
    ),
    TinyModel(
        name="gemma3-capped-linear",
        family="Gemma3",
        settings={
            **_GEMMA3,
            "sliding_window": 3,
            "final_logit_softcapping": 4.0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
            },
            "tie_word_embeddings": False,
        },
    ),
    TinyModel(name="deepseek-v2", family="DeepseekV2", settings={**_LATENT, "q_lora_rank": None}),
    TinyModel(
        name="deepseek-v2-groups-biases",
        family="DeepseekV2",
        settings={**_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    TinyModel(name="deepseek-v3", family="DeepseekV3", settings={**_LATENT, **_GROUPS}),
    TinyModel(
        name="deepseek-v3-yarn-halves",
        family="DeepseekV3",
        settings={
            **_LATENT,
            **_GROUPS,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
        },
    ),
    TinyModel(
        name="glm4-moe-lite",
        family="Glm4MoeLite",
        settings={**_LATENT_GLM, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    TinyModel(name="mixtral", family="Mixtral", settings={"num_local_experts": 5}),
    TinyModel(
        name="mixtral-window-all-experts",
        family="Mixtral",
        settings={"sliding_window": 7, "num_local_experts": 3, "num_experts_per_tok": 3, **_ONE_KV_HEAD_OF_8},
    ),
    TinyModel(name="qwen2-moe", family="Qwen2Moe", settings=_SHARED),
    TinyModel(
        name="qwen2-moe-windows",
        family="Qwen2Moe",
        settings={
            **_SHARED,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    TinyModel(name="gpt-oss", family="GptOss", settings=_GPT_OSS),
    TinyModel(
        name="gpt-oss-without-biases",
        family="GptOss",
        settings={
            **_GPT_OSS,
            "attention_bias": False,
            "sliding_window": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_experts_per_tok": 5,
            **_ONE_KV_HEAD_OF_8,
        },
    ),
    TinyModel(name="qwen3-moe", family="Qwen3Moe", settings={**_EXPERTS, "norm_topk_prob": True}),
    TinyModel(
        name="qwen3-moe-one-of-13",
        family="Qwen3Moe",
        settings={"num_experts": 13, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "attention_bias": True},
    ),
    TinyModel(
        name="qwen3-moe-mixed",
        family="Qwen3Moe",
        settings={
            **_EXPERTS,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(name="gemma4", family="Gemma4", settings=_GEMMA4),
    TinyModel(name="gemma4-one-size", is_variant=True, family="Gemma4", settings={**_GEMMA4, "head_dim": 16}),
    # Its scores have no scale, and three layers amplify what a fourth rounds.
    TinyModel(name="gemma4-shared", family="Gemma4", settings={**_GEMMA4, **_GEMMA4_SHARED}, tolerance=3e-4),
    TinyModel(name="gemma4-experts", family="Gemma4", settings={**_GEMMA4, **_GEMMA4_EXPERTS}),
    TinyModel(
        name="gemma2", family="Gemma2", settings={"pad_token_id": 0, "sliding_window": 9, "query_pre_attn_scalar": 10}
    ),
    TinyModel(name="granite", family="Granite", settings=_MULTIPLIERS),
    TinyModel(
        name="smollm3",
        family="SmolLM3",
        settings={"no_rope_layer_interval": 2},
    ),
    TinyModel(name="seed-oss", family="SeedOss", settings={"attention_bias": True, "attention_out_bias": True}),
    TinyModel(name="exaone4", family="Exaone4", settings={"sliding_window": 9, "sliding_window_pattern": 2}),
    TinyModel(name="phi3", family="Phi3"),
    TinyModel(
        name="phi3-long",
        family="Phi3",
        settings={
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 16,
        },
    ),
    TinyModel(name="lfm2", family="Lfm2", settings=_SHORT_CONV, is_variant=True),
    TinyModel(
        name="lfm2-biases",
        is_variant=True,
        family="Lfm2",
        settings={
            **_SHORT_CONV,
            "layer_types": None,
            "full_attn_idxs": [0],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_ffn_dim_multiplier": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    TinyModel(
        name="lfm2-moe",
        family="Lfm2Moe",
        settings={**_SHORT_CONV, **_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    TinyModel(name="lfm3", family="Lfm3", settings={"layer_types": _LFM3_KINDS, "sliding_window": 6}),
    TinyModel(
        name="lfm3-plain",
        is_variant=True,
        family="Lfm3",
        settings={
            "layer_types": ["full_attention", "conv", "sliding_attention"],
            "sliding_window": 5,
            "conv_L_cache": 4,
            "conv_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
            },
            "tie_word_embeddings": False,
        },
    ),
    TinyModel(
        name="granite-hybrid",
        family="GraniteMoeHybrid",
        settings={**_MAMBA2, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    TinyModel(
        name="granite-hybrid-dense",
        is_variant=True,
        family="GraniteMoeHybrid",
        settings={
            **_MAMBA2,
            "layer_types": ["attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "position_embedding_type": None,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(name="nemotron-h", family="NemotronH", settings={**_BRANCHES, "tie_word_embeddings": True}),
    TinyModel(
        name="nemotron-h-latent",
        is_variant=True,
        family="NemotronH",
        settings={
            **_BRANCHES,
            "layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention", "moe"],
            "moe_latent_size": 17,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
            "norm_topk_prob": False,
        },
    ),
    TinyModel(name="falcon-h1", family="FalconH1", settings=_BESIDE, tolerance=3e-4),
    TinyModel(
        name="falcon-h1-plain",
        is_variant=True,
        family="FalconH1",
        settings={
            "mamba_d_ssm": 40,
            "mamba_n_heads": 4,
            "mamba_d_head": 10,
            "mamba_n_groups": 1,
            "mamba_d_state": 9,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    TinyModel(name="mamba2", family="Mamba2", settings=_MAMBA2_ALONE),
    TinyModel(name="olmo2", family="Olmo2", settings={"attention_bias": True}),
    TinyModel(
        name="olmo3",
        family="Olmo3",
        settings={
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    TinyModel(name="olmoe", family="Olmoe", settings={"head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2}),
    TinyModel(
        name="olmoe-clipped",
        is_variant=True,
        family="Olmoe",
        settings={"head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.7},
    ),
    TinyModel(name="glm4", family="Glm4", settings=_HALF),
    TinyModel(name="glm4-moe", family="Glm4Moe", settings={**_HALF, **_LEADING, "use_qk_norm": True}),
    TinyModel(
        name="minimax-m2",
        family="MiniMaxM2",
        settings={
            **_HALF,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    TinyModel(
        name="ministral3",
        family="Ministral3",
        settings={"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    ),
    TinyModel(name="ernie4-5", family="Ernie4_5", settings={"use_bias": True}),
    TinyModel(
        name="ernie4-5-moe",
        family="Ernie4_5_Moe",
        settings={"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 21, "tie_word_embeddings": False},
    ),
    TinyModel(
        name="hunyuan",
        family="HunYuanDenseV1",
        settings={"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 100.0, "factor": 1.0}},
    ),
    TinyModel(name="starcoder2", family="Starcoder2", settings={"sliding_window": 9}),
    TinyModel(name="stablelm", family="StableLm", settings={**_HEADS_OF_8, "use_qkv_bias": True}),
    TinyModel(
        name="stablelm-parallel",
        family="StableLm",
        settings={
            **_HEADS_OF_8,
            "use_parallel_residual": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    TinyModel(
        name="stablelm-norms",
        family="StableLm",
        settings={**_HEADS_OF_8, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    TinyModel(name="phi", family="Phi", settings={**_HEADS_OF_8, "hidden_act": "gelu_new"}),
    TinyModel(name="nemotron", family="Nemotron", settings={**_HALF, "mlp_bias": True}),
    TinyModel(name="cohere", family="Cohere", settings={"head_dim": 6, "logit_scale": 0.6}),
    TinyModel(
        name="cohere-plus",
        is_variant=True,
        family="Cohere",
        settings={"head_dim": 6, "logit_scale": 0.6, "use_qk_norm": True},
    ),
    TinyModel(
        name="cohere2",
        family="Cohere2",
        settings={
            "head_dim": 6,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 0.6,
        },
    ),
    TinyModel(
        name="muse-glimmer",
        family="MuseGlimmer",
        settings={
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "layer_rope_theta": [300.0, 0, 300.0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "output_multiplier": 0.7,
        },
    ),
    TinyModel(
        name="llama4",
        family="Llama4",
        settings={
            "intermediate_size": 21,
            "intermediate_size_mlp": 45,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    TinyModel(
        name="llama4-as-published",  # what GGUF files have
        is_variant=True,
        family="Llama4",
        settings={
            "num_hidden_layers": 4,
            "intermediate_size": 21,
            "intermediate_size_mlp": 45,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
        },
    ),
    # transformers computes linear attention in two ways, which differ by up to 1e-4 in logits of these models.
    TinyModel(name="qwen3-5", family="Qwen3_5", settings=_HYBRID, tolerance=5e-4),
    TinyModel(
        name="qwen3-5-of-32-heads",
        family="Qwen3_5",
        tolerance=5e-4,
        settings={
            **_HYBRID,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 48,
            "linear_conv_kernel_dim": 2,
            "layer_types": None,
            "full_attention_interval": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    TinyModel(name="qwen3-5-moe", family="Qwen3_5Moe", settings={**_HYBRID, **_SHARED}, tolerance=5e-4),
    TinyModel(
        name="qwen3-next",
        family="Qwen3Next",
        settings={**_HYBRID, **_SHARED, "decoder_sparse_step": 2},
        tolerance=5e-4,
    ),
    TinyModel(
        name="qwen3-next-one-head",
        family="Qwen3Next",
        tolerance=5e-4,
        settings={
            **_HYBRID,
            **_SHARED,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 5,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
        },
    ),
]
TINY_MODELS = [case for case in _ALL if RUNS_ALL or not case.is_variant]


def by_name(name: str) -> TinyModel:
    return next(case for case in _ALL if case.name == name)


_FOLDERS: list[TemporaryDirectory[str]] = []  # until the process ends


@cache
def saved(name: str) -> tuple[Path, Any]:
    """Return a model's checkpoint and transformers' model of it, made once in a process. Only to be read."""
    _FOLDERS.append(TemporaryDirectory(prefix=f"octavo-{name}-"))
    folder = Path(_FOLDERS[-1].name)
    return folder, by_name(name).save(folder)
