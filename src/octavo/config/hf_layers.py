"""Reads what layers are from `config.json`: heads, biases, sliding windows, mixtures of experts."""

import logging

from octavo.config.architectures import ArchitectureFacts, MoEFacts
from octavo.config.json_fields import JsonFields
from octavo.config.model import MoEConfig
from octavo.errors import CheckpointError, UnsupportedModelError

logger = logging.getLogger(__name__)

_RULES_OF_DEFAULTS = frozenset({"pattern", "upper_layers", "even_lower_layers"})  # layer_types may say otherwise
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")  # transformers 5 renames the first to the second


def read_heads(fields: JsonFields, facts: ArchitectureFacts) -> tuple[int, int, int]:
    """Return the numbers of query and KV heads, and the head size."""
    num_heads = fields.integer("num_attention_heads")
    absent = num_heads if "num_key_value_heads" in fields.nulls else facts.num_kv_heads or num_heads
    num_kv_heads = fields.integer("num_key_value_heads", absent)
    if num_heads % num_kv_heads:
        raise fields.fail("num_attention_heads", f"a multiple of num_key_value_heads ({num_kv_heads}) is expected")
    hidden_size = fields.integer("hidden_size")
    if "head_dim" not in fields and facts.head_dim is None and hidden_size % num_heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}) is expected, or head_dim")
    head_dim = fields.integer("head_dim", facts.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError(f"{fields.origin}: head_dim={head_dim}: rotary embedding needs an even number")
    return num_heads, num_kv_heads, head_dim


def read_biases(fields: JsonFields, facts: ArchitectureFacts) -> tuple[bool, bool]:
    """Return whether q, k and v have biases, and whether the output projection has one."""
    if facts.has_qkv_bias_key:
        return fields.flag("qkv_bias", True), False
    if facts.qkv_bias is not None:
        return facts.qkv_bias, False
    has_bias = fields.flag("attention_bias", False)
    return has_bias, has_bias


def read_attention_scale(fields: JsonFields, facts: ArchitectureFacts) -> float | None:
    """Return the factor on products of queries and keys; None: the usual one."""
    if not facts.has_attention_scale_key:
        return None
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if fields.values.get(key):
            raise fields.unsupported(key)
    return float(fields.number("query_pre_attn_scalar", 256.0) ** -0.5)


def read_sliding_windows(fields: JsonFields, facts: ArchitectureFacts) -> tuple[int | None, ...]:
    """Return each layer's window in tokens; None for full attention."""
    num_layers = fields.integer("num_hidden_layers")
    if facts.window_rule == "none" and "sliding_window" in fields:
        logger.warning("%s: sliding_window has no effect in this architecture", fields.origin)
    window = _window(fields, facts)
    by_rule = tuple(window if _has_window(layer, fields, facts) else None for layer in range(num_layers))
    if "layer_types" not in fields:
        return by_rule
    by_type = _windows_of_types(fields, window, num_layers)
    if facts.window_rule not in _RULES_OF_DEFAULTS and by_type != by_rule:
        raise UnsupportedModelError(f"{fields.origin}: layer_types: in this architecture all layers are of one type")
    return by_type


def _window(fields: JsonFields, facts: ArchitectureFacts) -> int | None:
    """Return the window of layers that have one. An absent key means the default, null means no window."""
    if facts.window_rule == "none" or "sliding_window" in fields.nulls:
        return None
    if facts.window_rule not in {"all_layers", "pattern"} and not fields.flag("use_sliding_window", False):
        return None
    if "sliding_window" not in fields and facts.window is None:
        return None
    return fields.integer("sliding_window", facts.window)


def _has_window(layer: int, fields: JsonFields, facts: ArchitectureFacts) -> bool:
    if facts.window_rule == "pattern":
        return (layer + 1) % fields.integer("sliding_window_pattern", 6) != 0
    if facts.window_rule not in _RULES_OF_DEFAULTS:
        return True
    border = fields.integer("max_window_layers", 28, minimum=0)
    return layer >= border if facts.window_rule == "upper_layers" else layer < border and layer % 2 == 0


def _windows_of_types(fields: JsonFields, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    types = fields.texts("layer_types")
    if len(types) != num_layers:
        raise CheckpointError(f"{fields.origin}: layer_types: {num_layers} entries are expected, found {len(types)}")
    for kind in types:
        if kind not in {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(f"{fields.origin}: layer_types: {kind!r} is not supported")
    if window is None and "sliding_attention" in types:
        raise CheckpointError(f"{fields.origin}: layer_types: sliding_attention is listed, but there is no window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_moe(fields: JsonFields, facts: ArchitectureFacts) -> MoEConfig | None:
    """Read which layers have experts and how tokens are routed; None if no layer has experts."""
    if facts.moe is None:
        _refuse_if_set(fields, _NUM_EXPERTS_KEYS)
        return None
    stated = [key for key in _NUM_EXPERTS_KEYS if key in fields]
    numbers = [fields.integer(key) for key in stated]
    if len(set(numbers)) > 1:
        raise fields.fail(stated[0], f"{stated[1]} is {numbers[1]}")
    num_experts = numbers[0] if numbers else facts.moe.num_experts
    top_k = fields.integer("num_experts_per_tok", facts.moe.top_k)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts ({num_experts})")
    is_sparse = _sparse_layers(fields, facts.moe)
    if not any(is_sparse):
        return None
    own_key = "intermediate_size" if facts.moe.intermediate_size is None else "moe_intermediate_size"
    shared_size = None
    if facts.moe.shared_intermediate_size is None:
        _refuse_if_set(fields, ("shared_expert_intermediate_size", "n_shared_experts"))
    else:
        shared_size = fields.integer("shared_expert_intermediate_size", facts.moe.shared_intermediate_size)
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer(own_key, facts.moe.intermediate_size),
        shared_intermediate_size=shared_size,
        renormalizes=facts.moe.always_renormalizes or fields.flag("norm_topk_prob", False),
        is_sparse=is_sparse,
    )


def _sparse_layers(fields: JsonFields, facts: MoEFacts) -> tuple[bool, ...]:
    """Return whether each layer has experts: every decoder_sparse_step-th, except mlp_only_layers."""
    num_layers = fields.integer("num_hidden_layers")
    if not facts.has_dense_layers:
        return (True,) * num_layers
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    if dense and max(dense) >= num_layers:
        raise fields.fail("mlp_only_layers", f"numbers of layers below num_hidden_layers ({num_layers}) are expected")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _refuse_if_set(fields: JsonFields, keys: tuple[str, ...]) -> None:
    for key in keys:
        if fields.values.get(key):
            raise fields.unsupported(key, " in this architecture")
