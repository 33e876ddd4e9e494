"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): state spaces alone, without attention and MLPs."""

from collections.abc import Mapping
from typing import Any

from octavo.config.families.nemotron_h import MAMBA_GGUF_NAMES, MAMBA_NAMES
from octavo.config.family import Family, GgufFacts, GgufKeys, Layers
from octavo.config.json_fields import JsonFields
from octavo.config.layers import LayerSpec
from octavo.config.mamba2 import read_mamba2

_NO_LIMIT = 1 << 20  # tokens: a state is of one size whatever the length


def _read_layers(fields: JsonFields, family: Family, max_position_embeddings: int) -> Layers:
    head_dim, num_heads = fields.integer("head_dim"), fields.integer("num_heads")
    width = fields.integer("expand", 2) * fields.integer("hidden_size")
    if num_heads * head_dim != width:
        raise fields.fail("num_heads", f"expand * hidden_size ({width}) in heads of head_dim ({head_dim}) is expected")
    mamba = read_mamba2(
        fields,
        heads="num_heads",
        head_dim=head_dim,
        groups=("n_groups", 8),
        state=("state_size", 128),
        conv=("conv_kernel", 4),
        has_bias=fields.flag("use_bias", False),
        has_conv_bias=fields.flag("use_conv_bias", True),
    )
    return (LayerSpec(mamba, None),) * fields.integer("num_hidden_layers"), ()


def _gguf_settings(keys: GgufKeys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, width, hidden_size = (
        keys.integer(name) for name in ("ssm.time_step_rank", "ssm.inner_size", "embedding_length")
    )
    if width % num_heads or width % hidden_size:
        raise keys.fail("ssm.inner_size", f"a multiple of {num_heads} heads and of embedding_length is expected")
    return {
        "num_heads": num_heads,
        "head_dim": width // num_heads,
        "expand": width // hidden_size,
        "n_groups": keys.integer("ssm.group_count"),
        "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.tensors),
        "use_bias": any(name.endswith("ssm_in.bias") for name in keys.tensors),
    }


FAMILIES = (
    Family(
        name="Mamba2ForCausalLM",
        model_type="mamba2",
        model="octavo.models.branches:BranchesForCausalLM",
        read_layers=_read_layers,
        weight_names=MAMBA_NAMES,
        usual_keys={"layer_norm_epsilon": "rms_norm_eps"},
        rms_norm_eps=1e-5,
        defaults={
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "max_position_embeddings": _NO_LIMIT,
        },
        gguf=GgufFacts(
            architecture="mamba2",
            names=MAMBA_GGUF_NAMES,
            settings=_gguf_settings,
            own_keys=frozenset({"attention.value_length", "rope.dimension_count"}),  # it has neither
        ),
    ),
)
