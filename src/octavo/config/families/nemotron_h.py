"""Nemotron-H and Nemotron 3 (NVIDIA 2025, arXiv:2504.03624): Mamba-2, attention, MLPs and experts, one a layer."""

from collections.abc import Mapping
from typing import Any

from octavo.config.family import Family, GgufFacts, GgufKeys, Layers
from octavo.config.hf_layers import read_layers, without_keys
from octavo.config.json_fields import JsonFields
from octavo.config.layers import ExpertsSpec, LayerSpec, Mamba2Spec, RoutingSpec
from octavo.config.mamba2 import ATTENTION_KINDS, MAMBA_KINDS, read_mamba2
from octavo.errors import UnsupportedModelError

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS, _PATTERN = "layers_block_type", "hybrid_override_pattern"
_DEFAULT_KINDS = ["mamba", "moe", "attention", "mlp"]
_EPSILON = 1e-20  # in transformers' sum of the chosen scores


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    kinds = _kinds(fields)
    dropped = (_KINDS, "sliding_window", "n_shared_experts", "num_local_experts", "num_experts", "num_experts_per_tok")
    plain = without_keys(fields, *dropped).with_key("num_hidden_layers", len(kinds))
    [layer, *_], _ = read_layers(plain, family, max_position_embeddings)
    attention, dense = layer.with_attention(rotary=None).mixer, layer.feed_forward
    mamba = _mamba2(fields) if MAMBA_KINDS.intersection(kinds) else None
    experts = _experts(fields) if "moe" in kinds else None

    def layer_of(kind: str) -> LayerSpec:
        if kind in MAMBA_KINDS:
            return LayerSpec(mamba, None)
        if kind in ATTENTION_KINDS:
            return LayerSpec(attention, None)
        return LayerSpec(None, experts if kind == "moe" else dense)

    return tuple(map(layer_of, kinds)), ()


def _kinds(fields: JsonFields) -> list[str]:
    if _KINDS in fields:
        kinds, key = fields.texts(_KINDS), _KINDS
    elif _PATTERN in fields:
        kinds, key = [_LETTERS.get(letter, letter) for letter in fields.text(_PATTERN)], _PATTERN
    else:
        return _DEFAULT_KINDS
    if unknown := sorted(set(kinds) - MAMBA_KINDS - ATTENTION_KINDS - {"mlp", "moe"}):
        raise UnsupportedModelError(f"{fields.origin}: {key}: {unknown[0]!r} is not supported")
    if not (MAMBA_KINDS | ATTENTION_KINDS).intersection(kinds):
        raise fields.fail(key, "one layer at least that mixes tokens is expected")
    return kinds


def _mamba2(fields: JsonFields) -> Mamba2Spec:
    if fields.text("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("mamba_hidden_act", "; known: silu")
    return read_mamba2(
        fields,
        heads="mamba_num_heads",
        head_dim=fields.integer("mamba_head_dim"),
        groups=("n_groups", 8),
        state=("ssm_state_size", 128),
        conv=("conv_kernel", 4),
        has_bias=fields.flag("use_bias", False),
        has_conv_bias=fields.flag("use_conv_bias", True),
    )


def _experts(fields: JsonFields) -> ExpertsSpec:
    num_experts, top_k = fields.integer("n_routed_experts", 8), fields.integer("num_experts_per_tok", 2)
    num_groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if num_experts % num_groups:
        raise fields.fail("n_group", f"a divisor of the number of experts ({num_experts}) is expected")
    if top_groups > num_groups:
        raise fields.fail("topk_group", f"at most n_group ({num_groups}) is expected")
    if top_k > top_groups * (num_experts // num_groups):
        raise fields.fail("num_experts_per_tok", "at most as many as the chosen groups have is expected")
    if num_groups > 1 and num_experts < 2 * num_groups:
        raise fields.fail("n_group", "groups of two experts at least are expected")
    if fields.flag("mlp_bias", False):
        raise fields.unsupported("mlp_bias", " with experts")
    renormalizes = fields.flag("norm_topk_prob", True)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("moe_intermediate_size", 7688),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        latent_size=fields.integer("moe_latent_size") if "moe_latent_size" in fields else None,
        renormalizes=renormalizes,
        routing=RoutingSpec(
            scores="sigmoid",
            num_groups=num_groups,
            top_groups=top_groups,
            group_best=2 if num_groups > 1 else 1,
            has_correction=True,
            scale=fields.number("routed_scaling_factor", 1.0),
            epsilon=_EPSILON if renormalizes else 0.0,
            gates_shared=False,
        ),
    )


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config.json`'s keys: a layer without KV heads and without a feed-forward size is Mamba-2."""
    num_layers = keys.integer("block_count")
    if keys.integer("nextn_predict_layers", 0, minimum=0):
        raise keys.unsupported("nextn_predict_layers", ": files without a head that predicts several tokens are read")
    heads, sizes = keys.values.get("attention.head_count_kv"), keys.values.get("feed_forward_length")
    for key, counts in (("attention.head_count_kv", heads), ("feed_forward_length", sizes)):
        if not isinstance(counts, list) or len(counts) != num_layers:
            raise keys.fail(key, f"an entry for each of {num_layers} layers is expected")
    routers, first = "blk.{}.ffn_gate_inp.weight", "blk.{}.ffn_up.weight"
    mlps = ["moe" if routers.format(layer) in keys.tensors else "mlp" for layer in range(num_layers)]
    widths = (keys.tensors[first.format(layer)] for layer in range(num_layers) if first.format(layer) in keys.tensors)
    num_heads = keys.integer("ssm.time_step_rank")
    return {
        _KINDS: [
            "attention" if head else mlp if size else "mamba"
            for head, size, mlp in zip(heads or (), sizes or (), mlps, strict=True)
        ],
        "num_key_value_heads": next((count for count in heads or () if count), so_far["num_attention_heads"]),
        "intermediate_size": next((width[0] for width in widths), 1),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in keys.tensors),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": keys.integer("ssm.inner_size") // num_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.tensors),
        "use_bias": any(name.endswith("ssm_in.bias") for name in keys.tensors),
        **(_gguf_experts(keys) if "moe" in mlps else {}),
    }


def _gguf_experts(keys: GgufKeys) -> dict[str, Any]:
    num_groups = keys.integer("expert_group_count", 1)
    if num_groups > 1 and "expert_group_used_count" not in keys:
        raise keys.unsupported("expert_group_count", ": the file does not say in how many groups experts are chosen")
    return {
        "num_experts": None,
        "n_routed_experts": keys.integer("expert_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.values.get("moe_latent_size"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": num_groups,
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


_LAYER, _PLACE = "model.layers.{layer}", "layers.{layer}"
_BRANCH, _MIXER, _MLP = f"{_LAYER}.mixer", f"{_PLACE}.attention", f"{_PLACE}.mlp"
_EXPERT = _BRANCH + ".experts.{expert}"
MAMBA_NAMES = {
    "model.embeddings": "embedding",
    f"{_LAYER}.norm": f"{_PLACE}.norm",
    _BRANCH: f"{_MIXER}.space",  # numbers without names of their own
    f"{_BRANCH}.conv1d": f"{_MIXER}.space:conv",
    f"{_BRANCH}.in_proj": f"{_MIXER}.rows",
    f"{_BRANCH}.norm": f"{_MIXER}.norm",
    f"{_BRANCH}.out_proj": f"{_MIXER}.output",
    "model.norm_f": "norm",
    "lm_head": "logits_head",
}
MAMBA_GGUF_NAMES = {
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_a.": "mixer.A_log",
    "ssm_d.": "mixer.D",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_GGUF = GgufFacts(
    architecture="nemotron_h",
    other_architectures=("nemotron_h_moe",),
    names={
        **MAMBA_GGUF_NAMES,
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.{expert}.up_proj",
        "ffn_down_exps": "mixer.experts.{expert}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    settings=_gguf_settings,
    own_keys=frozenset({"rope.dimension_count"}),  # there is no rotation
)
FAMILIES = (
    Family(
        name="NemotronHForCausalLM",
        model_type="nemotron_h",
        model="octavo.models.branches:BranchesForCausalLM",
        read_layers=_read_layers,
        weight_names={
            **MAMBA_NAMES,
            f"{_BRANCH}.q_proj": f"{_MIXER}.qkv:q",
            f"{_BRANCH}.k_proj": f"{_MIXER}.qkv:k",
            f"{_BRANCH}.v_proj": f"{_MIXER}.qkv:v",
            f"{_BRANCH}.o_proj": f"{_MIXER}.out",
            f"{_BRANCH}.up_proj": f"{_MLP}.up",
            f"{_BRANCH}.down_proj": f"{_MLP}.down",
            f"{_BRANCH}.gate": f"{_MLP}.router:experts",
            f"{_EXPERT}.up_proj": f"{_MLP}.experts.{{expert}}.gate_up",
            f"{_EXPERT}.down_proj": f"{_MLP}.experts.{{expert}}.down",
            f"{_BRANCH}.shared_experts.up_proj": f"{_MLP}.shared_expert.gate_up",
            f"{_BRANCH}.shared_experts.down_proj": f"{_MLP}.shared_expert.down",
            f"{_BRANCH}.fc1_latent_proj": f"{_MLP}.latent_down",
            f"{_BRANCH}.fc2_latent_proj": f"{_MLP}.latent_up",
        },
        other_spellings={
            f"{_BRANCH}.experts.{part}_proj": (f"{_EXPERT}.{part}_proj.weight",) for part in ("up", "down")
        },
        usual_keys={
            "layer_types": _KINDS,
            "layer_norm_epsilon": "rms_norm_eps",
            "mlp_hidden_act": "hidden_act",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_limit": "time_step_limit",
            "mamba_conv_bias": "use_conv_bias",
        },
        left_out=("mtp.",),  # a head that predicts several tokens
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=False,
        has_mlp_bias_key=True,
        rms_norm_eps=1e-5,
        activation="relu2",
        defaults={
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
        },
        gguf=_GGUF,
    ),
)
