"""How many weights a model has, part by part, from its configuration alone."""

from dataclasses import dataclass

from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage


@dataclass(frozen=True, slots=True)
class LinearShapes:
    """Linear maps of one size."""

    count: int
    num_outputs: int
    in_size: int

    def num_weights(self) -> int:
        return self.count * self.num_outputs * self.in_size


def layer_linears(model: ModelConfig, layer: int) -> list[LinearShapes]:
    """Return the linear layers of one layer, but for routers: those are never made integers."""
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    linears = [LinearShapes(1, query + 2 * key, hidden), LinearShapes(1, hidden, query)]
    for count, size in _mlps(model, layer):
        linears += [LinearShapes(count, 2 * size, hidden), LinearShapes(count, hidden, size)]
    return linears


def layer_parameters(model: ModelConfig, layer: int) -> int:
    """Return the number of weights of one layer: maps, routers, biases and norms."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    num_weights = sum(map(LinearShapes.num_weights, layer_linears(model, layer)))
    num_weights += (query + 2 * key) * model.attention_bias + model.hidden_size * model.attention_out_bias
    num_weights += 2 * model.hidden_size + 2 * model.head_dim * model.qk_norm
    if (moe := model.moe) is not None and moe.is_sparse[layer]:
        return num_weights + model.hidden_size * (moe.num_experts + (moe.shared_intermediate_size is not None))
    return num_weights + (2 * model.intermediate_size + model.hidden_size) * model.mlp_bias


def _mlps(model: ModelConfig, layer: int) -> list[tuple[int, int]]:
    """Return (how many, inner size) of a layer's MLPs: one, or experts, and perhaps one that all tokens share."""
    moe = model.moe
    if moe is None or not moe.is_sparse[layer]:
        return [(1, model.intermediate_size)]
    shared = moe.shared_intermediate_size
    return [(moe.num_experts, moe.intermediate_size), *([] if shared is None else [(1, shared)])]


def vocabulary_parameters(model: ModelConfig) -> int:
    """Return the number of weights of the embedding, which is also that of the logits head."""
    return model.vocab_size * model.hidden_size


def stage_parameters(model: ModelConfig, stage: Stage) -> int:
    """Return the number of weights that a stage holds. A table that both its ends share counts once."""
    num_tables = stage.is_first + stage.is_last - (stage.is_whole and model.tie_word_embeddings)
    layers = sum(layer_parameters(model, layer) for layer in stage.layers)
    return layers + num_tables * vocabulary_parameters(model) + model.hidden_size * stage.is_last


def count_parameters(model: ModelConfig) -> int:
    """Return the number of weights of the whole model."""
    return stage_parameters(model, Stage.whole(model.num_layers))
