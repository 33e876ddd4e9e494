"""Reads mixture-of-experts settings from `config.json`."""

from octavo.config.architectures import ArchitectureFacts, MoEFacts
from octavo.config.json_fields import JsonFields
from octavo.config.model import MoEConfig
from octavo.errors import UnsupportedModelError

_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")  # transformers 5 renames the first to the second


def read_moe(fields: JsonFields, facts: ArchitectureFacts) -> MoEConfig | None:
    """Read which layers have experts and how tokens are routed; None if no layer has experts.

    Raises:
        CheckpointError: malformed or inconsistent values.
        UnsupportedModelError: experts, or a shared expert, in an architecture without them.
    """
    if facts.moe is None:
        _refuse_if_set(fields, _NUM_EXPERTS_KEYS)
        return None
    num_experts = _num_experts(fields, facts.moe)
    top_k = fields.integer("num_experts_per_tok", facts.moe.top_k)
    if top_k > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most as many as there are experts ({num_experts})")
    is_sparse = _sparse_layers(fields, facts.moe)
    if not any(is_sparse):
        return None
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=_intermediate_size(fields, facts.moe),
        shared_intermediate_size=_shared_intermediate_size(fields, facts.moe),
        renormalizes=facts.moe.always_renormalizes or fields.flag("norm_topk_prob", False),
        is_sparse=is_sparse,
    )


def _num_experts(fields: JsonFields, facts: MoEFacts) -> int:
    stated = [key for key in _NUM_EXPERTS_KEYS if key in fields]
    numbers = [fields.integer(key) for key in stated]
    if len(set(numbers)) > 1:
        raise fields.fail(stated[0], f"{stated[1]} is {numbers[1]}")
    return numbers[0] if numbers else facts.num_experts


def _sparse_layers(fields: JsonFields, facts: MoEFacts) -> tuple[bool, ...]:
    """Return whether each layer has experts: every decoder_sparse_step-th, except mlp_only_layers."""
    num_layers = fields.integer("num_hidden_layers")
    if not facts.has_dense_layers:
        return (True,) * num_layers
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    if dense and max(dense) >= num_layers:
        raise fields.fail("mlp_only_layers", f"numbers of layers below num_hidden_layers ({num_layers}) are expected")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _intermediate_size(fields: JsonFields, facts: MoEFacts) -> int:
    if facts.intermediate_size is None:
        return fields.integer("intermediate_size")
    return fields.integer("moe_intermediate_size", facts.intermediate_size)


def _shared_intermediate_size(fields: JsonFields, facts: MoEFacts) -> int | None:
    if facts.shared_intermediate_size is None:
        _refuse_if_set(fields, ("shared_expert_intermediate_size", "n_shared_experts"))
        return None
    return fields.integer("shared_expert_intermediate_size", facts.shared_intermediate_size)


def _refuse_if_set(fields: JsonFields, keys: tuple[str, ...]) -> None:
    for key in keys:
        if fields.values.get(key):
            raise UnsupportedModelError(
                f"{fields.origin}: {key}={fields.values[key]!r} is not supported in this architecture"
            )
