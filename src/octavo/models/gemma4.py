"""Gemma 4: norms around each branch, layers that read an embedding of the token of their own, experts beside the MLP.

What differs in attention (two sizes of heads, shared keys and values) is in the specs. A layer ends with the residual
stream times a number, so none is carried on beside it.

Legend: T = tokens, W = tokens kept after the last layer's attention, D = hidden size, L = layers, P = elements of a
token's input to a layer, X = experts, C = experts per token.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache, LayerKVCache
from octavo.config.layers import DenseSpec, ExpertsSpec
from octavo.config.model import ModelConfig, TokenInputs
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.types import Activation, Routes
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm
from octavo.layers.vocabulary import Embedding
from octavo.layers.weight_owner import PlainWeights
from octavo.models.common import DecoderLayer, GatedMLP
from octavo.models.interfaces import CausalLM, IntermediateTensors

_KEYS_AND_VALUES = re.compile(r"model\.layers\.(?P<layer>\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight")


class LayerScalar(PlainWeights):
    """The number that a layer's output is multiplied by."""

    def __init__(self, *, context: BuildContext) -> None:
        super().__init__({"layer_scalar": torch.ones(1, dtype=context.dtype, device=context.device)}, context=context)
        self.value = 1.0

    @property
    def num_weights(self) -> int:
        return 0  # a buffer, no parameter

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor)
        self._read()

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().adopt_packed(tensors)
        self._read()

    def _read(self) -> None:
        self.value = float(self._tensors["layer_scalar"])


class RouterScales(PlainWeights):
    """What a router's input [D], and the weight of each chosen expert [X], are multiplied by."""

    def __init__(self, hidden_size: int, num_experts: int, *, context: BuildContext) -> None:
        dtype, device = context.dtype, context.device
        inputs, experts = (torch.ones(size, dtype=dtype, device=device) for size in (hidden_size, num_experts))
        super().__init__({"scale": inputs, "per_expert_scale": experts}, context=context)
        self.inputs, self.experts = inputs, experts


class ExpertsBesideMLP(MixtureOfExperts):
    """Experts that read the residual stream as it is before the MLP; both outputs have a norm before they are added."""

    is_recordable = False  # routing is op by op

    def __init__(self, layer: int, config: ModelConfig, spec: ExpertsSpec, *, context: BuildContext) -> None:
        if context.groups.experts.size > 1:
            raise UnsupportedModelError(
                f"{config.model}: enable_expert_parallel: experts beside an MLP are not sharded"
            )
        super().__init__(
            layer, config.hidden_size, spec, Activation(config.activation), context=context, name="experts"
        )
        norms = (RMSNorm(config.hidden_size, config.rms_norm_eps, context=context) for _ in range(3))
        self.mlp_norm, self.norm, self.post_norm = norms
        self.scales = RouterScales(config.hidden_size, spec.num_experts, context=context)
        self._ones = torch.ones_like(self.scales.inputs)  # the router's norm has no weights
        self._eps, self._factor = config.rms_norm_eps, config.hidden_size**-0.5

    def add_to(self, mlp: torch.Tensor, stream: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        """Add the experts' output on the stream [T, D] to the MLP's [T, D]."""
        kernels = self._kernels
        normed = kernels.rms_norm(stream, self._ones, self._eps)
        routes = kernels.route(normed * self.scales.inputs * self._factor, self.router.packed, self._routing)
        self.count(routes)
        scaled = Routes(
            expert_ids=routes.expert_ids, weights=routes.weights * self.scales.experts[routes.expert_ids].float()
        )
        out = self._sum_of_chosen(self.norm(stream), scaled, adapter_ids)
        return kernels.scaled_sum(self.mlp_norm(mlp), self.post_norm(out), 1.0)

    def _sum_of_chosen(self, x: torch.Tensor, routes: Routes, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum [T, D] of the chosen experts' outputs on x [T, D]."""
        num_tokens, num_choices = routes.expert_ids.shape
        token_ids = torch.arange(num_tokens, device=x.device).repeat_interleave(num_choices)
        pairs = x, token_ids, routes.expert_ids.flatten(), self.packed, self._activation
        adapters = self.adapters_of(adapter_ids)
        if adapters is None:
            rows = self._kernels.expert_rows(*pairs)
        else:
            rows = self._kernels.adapted_expert_rows(*pairs, adapters)
        out = self._kernels.combine_experts(rows.view(num_tokens, num_choices, -1), routes.weights)
        return self._group.all_reduce(out)


class TokenInput(nn.Module):
    """One layer's branch: its own embedding of the token, gated by the stream."""

    def __init__(self, layer: int, config: ModelConfig, inputs: TokenInputs, context: BuildContext) -> None:
        super().__init__()
        context = context.at(f"layers.{layer}.token_input")
        self._kernels, self._first = context.kernels, layer * inputs.size
        self._activation = Activation(config.activation)
        size, whole = config.hidden_size, Share.whole
        gate = context.at("gate")
        self.gate = MergedLinear(whole(size), {"": whole(inputs.size)}, has_bias=False, context=gate)
        self.projection = Linear(whole(inputs.size), size, has_bias=False, context=context.at("projection"))
        self.norm = RMSNorm(size, config.rms_norm_eps, context=context)

    def forward(self, stream: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return what is added to the stream [T, D]; `inputs` [T, D + L * P] have all layers' behind the embedding."""
        first = stream.shape[1] + self._first
        product = self._kernels.gated_product(self.gate(stream), inputs, first, self._activation)
        out: torch.Tensor = self.norm(self.projection(product))
        return out


class AllTokenInputs(nn.Module):
    """The inputs of all layers: from a table of their own, and from the embedding of the token."""

    def __init__(self, config: ModelConfig, inputs: TokenInputs, context: BuildContext) -> None:
        super().__init__()
        context = context.at("token_inputs")
        width, whole = config.num_layers * inputs.size, Share.whole
        self._kernels, self._size = context.kernels, inputs.size
        self.embedding = Embedding(inputs.vocab_size, width, context=context)
        projection = context.at("projection")
        self.projection = MergedLinear(
            whole(config.hidden_size), {"": whole(width)}, has_bias=False, context=projection
        )
        self.norm = RMSNorm(inputs.size, config.rms_norm_eps, context=context)
        self._table_scale = torch.tensor(inputs.size**0.5, dtype=context.dtype).item()  # rounded, as in training
        self._projection_scale = config.hidden_size**-0.5

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return [T, L * P] for tokens [T] with embeddings x [T, D]."""
        of_tokens = self.embedding(ids) * self._table_scale
        projected = (self.projection(x) * self._projection_scale).view(-1, self._size)
        combined: torch.Tensor = (self.norm(projected).view(len(x), -1) + of_tokens) * 2.0**-0.5
        return combined


class Gemma4Layer(DecoderLayer):
    """One block. Its output is the residual stream itself."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: nn.Module,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        post_norms: tuple[RMSNorm, RMSNorm],
        experts: ExpertsBesideMLP | None,
        token_input: TokenInput | None,
        context: BuildContext,
    ) -> None:
        super().__init__(attention_norm, attention, mlp_norm, mlp, post_norms, kernels=context.kernels)
        self.experts, self.token_input, self.scalar = experts, token_input, LayerScalar(context=context)

    def run(
        self, x: torch.Tensor, inputs: torch.Tensor, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> torch.Tensor:
        """Return the stream [T, D] behind this block of that before it; last block: [W, D]. `inputs`: `TokenInput`."""
        is_last = bool(self.attention.is_last)
        x, stream = self.attention(self.attention_norm, x, None, kv_cache, step)
        adapter_ids = step.adapter_ids_after(is_last=is_last)
        x, stream = self.mlp(self.mlp_norm, self._finished(x, self.post_attention_norm), stream, adapter_ids)
        if self.experts is not None:
            x = self.experts.add_to(x, stream, adapter_ids)
        x = self._finished(x, self.post_mlp_norm)
        if self.token_input is not None:
            stream = self._kernels.scaled_sum(x, stream, 1.0)
            [kept] = step.rows_after(self._kernels, inputs, is_last=is_last)
            x = self.token_input(stream, kept)
        return self._kernels.scaled_sum(x, stream, self.scalar.value)


class Gemma4ForCausalLM(CausalLM):
    """The text model."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        context, size = self.context, config.hidden_size
        self._columns: torch.Tensor | None = None
        if config.token_inputs is None:
            return
        if not self.stage.is_whole:
            raise UnsupportedModelError(
                f"{config.model}: pipeline_parallel_size: its layers read embeddings of tokens, which only the first "
                "stage has"
            )
        self.token_inputs = AllTokenInputs(config, config.token_inputs, context)
        self._columns = torch.arange(size, dtype=torch.int32, device=context.device)

    @property
    def input_size(self) -> int:
        inputs = self.config.token_inputs
        return self.config.hidden_size + (inputs.size * self.config.num_layers if inputs else 0)

    def build_layer(self, layer: int) -> nn.Module:
        config, context = self.config, self.context
        before, between, *post = [self.build_norm() for _ in range(4)]
        spec = config.layers[layer].feed_forward
        dense = spec.beside if isinstance(spec, ExpertsSpec) else spec
        assert isinstance(dense, DenseSpec), "each layer has an MLP"
        experts = ExpertsBesideMLP(layer, config, spec, context=context) if isinstance(spec, ExpertsSpec) else None
        inputs = config.token_inputs
        token_input = None if inputs is None else TokenInput(layer, config, inputs, context)
        own = before, self.build_attention(layer), between, self.build_mlp(layer, dense)
        return Gemma4Layer(*own, (post[0], post[1]), experts, token_input, context)

    def ignores_weight(self, name: str) -> bool:
        """Published files have keys and values even of layers that read another's."""
        if super().ignores_weight(name):
            return True
        found = _KEYS_AND_VALUES.fullmatch(name)
        return found is not None and self.config.attention(int(found["layer"])).shares_kv_of is not None

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Embed the step's tokens: [T, D], and behind that the inputs of the layers, [T, D + L * P]."""
        x = super().embed(batch)
        if self.config.token_inputs is None:
            return x
        return torch.cat((x, self.token_inputs(batch.input_ids, x)), dim=1)

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        kernels, inputs = self.context.kernels, x
        if self._columns is not None:
            x = kernels.select_columns(inputs, self._columns)
        if residual is not None:  # from another stage
            x = kernels.scaled_sum(x, residual, 1.0)
        aux: list[torch.Tensor] = []
        for number, layer, kv_cache in zip(self.stage.layers, self.layers.values(), kv_caches, strict=True):
            if number in self.context.aux_layers:
                aux.append(x)
            assert isinstance(layer, Gemma4Layer)
            assert isinstance(kv_cache, LayerKVCache)
            x = layer.run(x, inputs, kv_cache, step)
        if self.stage.is_last:
            return IntermediateTensors(self.norm(x), x, tuple(aux))
        return IntermediateTensors(x, kernels.scaled_sum(x, None, 0.0), tuple(aux))
