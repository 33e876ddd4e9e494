"""A model that transformers' own code computes, with Octavo's attention over paged KV memory and its linear layers.

The library's class is built without weights; each of its linear layers is replaced by one of ours, which loads and
packs as in any model, and its other parameters load as they are. All requests of a step are one row of tokens to it:
they meet in attention alone, which is ours. So it needs no cache, no mask and no padding of its own.

Legend: T = tokens of the step, W = tokens that get logits, D = hidden size, V = vocabulary, H = query heads, G = kv
heads, E = head size.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from octavo.attention.base import AttentionBackend, AttentionLayer
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache, LayerKVCache
from octavo.config.family import Family, NameTable
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.errors import UnsupportedModelError
from octavo.kernels.types import Activation
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import TensorSpec
from octavo.layers.weight_owner import WeightOwner
from octavo.models.common import described_attention
from octavo.models.fallback_heads import angles_by_request, joined_heads
from octavo.models.fallback_layers import FallbackEmbedding, FallbackHead, FallbackLinear, is_linear
from octavo.models.fallback_plan import Plan
from octavo.models.fallback_probe import build
from octavo.models.interfaces import CausalLM, IntermediateTensors


class OwnParameters(WeightOwner):
    """The parameters that a module of the library has itself, and buffers that files have, loaded as they are.

    A buffer that a file has not is as the library made it. `tied` is a parameter that another module loads.
    """

    def __init__(self, module: nn.Module, context: BuildContext, tied: str = "") -> None:
        super().__init__()
        self._context, self._module = context, [module]  # not a submodule of this one
        self._tied = tied

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        own = {name: of for name, of in self._module[0].named_parameters(recurse=False) if name != self._tied}
        specs = {name: TensorSpec(tuple(parameter.shape)) for name, parameter in own.items()}
        return specs | {
            name: TensorSpec(tuple(buffer.shape), is_required=False)
            for name, buffer in stored_buffers(self._module[0]).items()
        }

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        module, device = self._module[0], self._context.device
        if name in module._buffers:
            setattr(module, name, tensor.to(device, getattr(module, name).dtype).clone())
        else:
            value = tensor.to(device, self._context.dtype).clone()
            setattr(module, name, nn.Parameter(value, requires_grad=False))


def stored_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a module itself has in checkpoints: of routers, what corrects scores."""
    own = dict(module.named_buffers(recurse=False))
    return {name: buffer for name, buffer in own.items() if name not in module._non_persistent_buffers_set}


class StackedExperts(OwnParameters):
    """A module whose parameters are stacks of experts, [X, N, K], which checkpoints hold one by one.

    `parts` has, for each parameter, the names of what an expert's rows consist of, one after the other.
    """

    def __init__(self, module: nn.Module, parts: Mapping[str, Sequence[str]], context: BuildContext) -> None:
        super().__init__(module, context)
        self._places = {
            f"{expert}.{name}": (parameter, expert, at, len(names))
            for parameter, names in parts.items()
            for expert in range(len(getattr(module, parameter)))
            for at, name in enumerate(names)
        }

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(self._shape(name)) for name in self._places}

    def _shape(self, name: str) -> tuple[int, ...]:
        parameter, _, _, count = self._places[name]
        _, num_rows, size = getattr(self._module[0], parameter).shape
        return num_rows // count, size

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        parameter, expert, at, _ = self._places[name]
        stack, num_rows = getattr(self._module[0], parameter), len(tensor)
        if stack.is_meta and self._context.device.type != "meta":
            stack = torch.empty(stack.shape, dtype=self._context.dtype, device=self._context.device)
            setattr(self._module[0], parameter, nn.Parameter(stack, requires_grad=False))
        stack.data[expert, at * num_rows : (at + 1) * num_rows] = tensor.to(self._context.device, self._context.dtype)


class _Hidden(tuple[torch.Tensor]):
    """What the model below the head returned: its hidden states, and nothing of what else the library asks for."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """In the place of the model below the head: returns the hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> "_Given":
        """Where the head asks for it, as in OPT."""
        return self

    def forward(self, *arguments: Any, **options: Any) -> _Hidden:
        return _Hidden((self.hidden,))


class FallbackForCausalLM(CausalLM):
    """Any causal language model of the library whose attention can be replaced."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        nn.Module.__init__(self)  # nothing of ours is built
        if context.stage is not None and not context.stage.is_whole:
            why = "models that transformers' own code computes have one stage: pipeline_parallel_size must be 1"
            raise UnsupportedModelError(f"{config.model}: {why}")
        self.config, self.stage, self.mapped_bytes = config, Stage.whole(config.num_layers), 0
        self.family = Family(name=config.architecture, model_type="", weight_names={})
        self.activation, self.embedding_scale, self.logits_soft_cap = Activation(), None, None
        self.rotary, self.layers, self.dense_steps = nn.ModuleList(), nn.ModuleDict(), nn.ModuleList()
        library = build(Path(config.path), _attend, context.dtype, experts="eager")
        self._plan = Plan(library, config.model, context.groups.tensor.size)
        self._names: dict[str, str] = {}
        self._twins, self._step = _twins_of(library), _Step()
        self._computed_buffers = {
            f"{name}.{buffer}"
            for name, module in library.named_modules()
            for buffer in module._non_persistent_buffers_set
        }
        transforms = get_model_conversion_mapping(library) or []
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self.context = context
        self._adopt(library, replace(context, checkpoint_names={}))
        self.library = library.to("meta") if context.device.type == "meta" else library
        for module in library.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.octavo_step = self._step
        if num_short := config.first_rotary_range:
            ranges = num_short, config.max_model_len
            for module in library.modules():
                if type(module).__name__.endswith("RotaryEmbedding"):
                    module.forward = partial(angles_by_request, module.forward, self._step, *ranges)
        self._step.layers = [self._describe(layer) for layer in range(config.num_layers)]
        self._step.backend, self._step.rank = context.attention, context.groups.tensor.rank
        self._given, head = _Given(), copy.copy(library)
        head._modules = {**library._modules, library.base_model_prefix: self._given}
        self._head = [head]  # not a submodule: its parts are the library's
        self._is_ready = False

    def _adopt(self, library: Any, context: BuildContext) -> None:
        """Replace linear layers, and find owners for all other parameters; fill the table of names."""
        self.owners = nn.ModuleDict()
        tied = self._adopt_vocabulary(library, context)
        for name, module in list(library.named_modules()):
            key = name.replace(".", "/")
            if tied is not None and module is tied:
                if getattr(module, "bias", None) is not None:
                    self.owners[key] = OwnParameters(module, context, tied="weight")
                    self._names[name] = f"owners.{key}"
                continue
            if isinstance(module, FallbackEmbedding | FallbackHead):
                self._names[name] = f"library.{name}" + ".rows" * isinstance(module, FallbackEmbedding)
                continue
            if is_linear(module):
                linear = FallbackLinear(module, context.at(name), self._plan.style_of(name))
                library.set_submodule(name, linear)
                self._names[name] = f"library.{name}"
                continue
            own = dict(module.named_parameters(recurse=False))
            stacks = {parameter: parts for parameter in own if (parts := self._parts_of(f"{name}.{parameter}"))}
            if stacks and stacks.keys() == own.keys():
                self.owners[key] = owner = StackedExperts(module, stacks, context)
                each = dict.fromkeys(tensor.rpartition(".")[0] for tensor in owner.checkpoint_tensors())
                self._names |= {f"{name}.{part}": f"owners.{key}:{part}" for part in each}
            elif own or stored_buffers(module):
                self.owners[key] = OwnParameters(module, context)
                self._names[name] = f"owners.{key}"

    def _adopt_vocabulary(self, library: Any, context: BuildContext) -> nn.Module | None:
        """Replace the head with the logits, and an embedding that it is tied to; else return the tied head."""
        names = {module: name for name, module in library.named_modules()}
        head, table = library.get_output_embeddings(), library.get_input_embeddings()
        context = replace(context, checkpoint_names={"logits_head": names[head], "embedding": names[table]})
        own = None
        if self._twins:
            if not isinstance(table, nn.Embedding) or not is_linear(head) or head.bias is not None:
                return cast(nn.Module, head)
            embedding = FallbackEmbedding(table, context)
            own = embedding.rows
            library.set_submodule(names[table], embedding)
        if is_linear(head):
            library.set_submodule(names[head], FallbackHead(head, own, context.at("logits_head")))
        return None

    def _parts_of(self, parameter: str) -> list[str]:
        """Return what an expert of a stack consists of in checkpoints, as the library says it; []: it is no stack."""
        for converter in self._converters:
            [*_, target] = converter.target_patterns
            if parameter.endswith(target) and all("*." in source for source in converter.source_patterns):
                return [source.partition("*.")[2] for source in converter.source_patterns]
        return []

    def _describe(self, layer: int) -> AttentionLayer:
        spec = self.config.attention(layer)
        for what, number in (("query heads", spec.num_heads), ("KV heads", spec.num_kv_heads)):
            self._plan.check_divides(what, number)
        heads = self._heads_of(spec)
        described = replace(described_attention(self.config, layer, heads), rotary=None)  # the library rotates
        self.context.attention.check(described)
        return described

    @property
    def weight_names(self) -> NameTable:
        return self._names

    @property
    def weight_targets(self) -> Mapping[str, str]:
        return self._names

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        return frozenset()

    @property
    def twins(self) -> Mapping[str, str]:
        return self._twins

    @property
    def bytes_in_file(self) -> int:
        return 0

    @property
    def recording_obstacle(self) -> str | None:
        return "transformers' own code is not native calls"

    def name_in_table(self, name: str) -> str:
        """As the library itself reads it: older names, or without the prefix of the model below the head."""
        for transform in self._renamings:
            name, _ = transform.rename_source_key(name)
        module, _, parameter = name.rpartition(".")
        prefixed = f"{self.library.base_model_prefix}.{module}"
        return f"{prefixed}.{parameter}" if module not in self._names and prefixed in self._names else name

    def ignores_weight(self, name: str) -> bool:
        """Buffers that older files have, and what the library leaves out itself."""
        left_out = getattr(self.library, "_keys_to_ignore_on_load_unexpected", None) or ()
        is_left_out = name in self._computed_buffers or any(re.search(pattern, name) for pattern in left_out)
        return is_left_out or super().ignores_weight(name)

    def run_stage(
        self, batch: ForwardBatch, kv_caches: Sequence[LayerCache], incoming: IntermediateTensors | None
    ) -> IntermediateTensors:
        """Run the whole model on the step's tokens as one row: hidden states [W, D] behind the last norm."""
        if not self._is_ready:  # weights are loaded now
            if not isinstance(self.library.get_input_embeddings(), FallbackEmbedding):
                self.library.tie_weights()
            self._is_ready = True
        self._step.begin(self.attention_step(batch), kv_caches)
        base = self.library.base_model
        found = base(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False)
        hidden = self.context.kernels.kept_rows(found.last_hidden_state[0], batch.kept_indices)
        return IntermediateTensors(hidden, hidden)

    def compute_logits(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [L, V] float32 of hidden states [L, D], by whatever the library does behind its model."""
        self._given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head[0](input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def logits_argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        largest, found = self.compute_logits(hidden).max(-1)
        return largest, found


class _Step:
    """What attention needs of the step that runs, reached from the library's modules."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []
        self.backend: AttentionBackend[Any] | None = None
        self.rank = 0
        self.positions = torch.empty(0)  # [T]
        self.rotary_positions = torch.empty(0)  # [T], of requests with short angles from max_model_len on
        self.caches: Sequence[LayerCache] = ()
        self._metadata: AttentionMetadata | None = None

    def begin(self, metadata: AttentionMetadata, caches: Sequence[LayerCache]) -> None:
        batch = metadata.batch
        self._metadata, self.caches = metadata, caches
        self.positions, self.rotary_positions = batch.positions, batch.rotary_positions

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Store keys and values and attend: from qkv [T, (H + 2 * G) * E] to [T, H * E]; sinks are all ranks' [H]."""
        cache, own = self.caches[layer], self.layers[layer]
        assert self.backend is not None and self._metadata is not None  # noqa: PT018 - a step runs
        assert isinstance(cache, LayerKVCache)
        if sinks is not None and own.sinks is None:  # loaded by now
            first = self.rank * own.num_heads if len(sinks) > own.num_heads else 0
            own = replace(own, sinks=sinks[first : first + own.num_heads].float().contiguous())
            self.backend.check(own)
            self.layers[layer] = own
        return self.backend.forward(qkv, cache, self._metadata, own)


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, H, T, ...]
    key: torch.Tensor,  # [1, G, T, ...]
    value: torch.Tensor,  # [1, G, T, ...]
    attention_mask: object = None,
    *,
    alibi: torch.Tensor | None = None,  # [H], see `fallback_heads`
    rounds_positions: bool = False,  # to bfloat16, as the model was trained
    s_aux: torch.Tensor | None = None,  # sinks
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The library's interface of attention: return [1, T, H, ...] of the size of values, and no weights."""
    step: _Step = module.octavo_step
    if alibi is not None and step.caches[module.layer_idx].key.dtype != query.dtype:
        raise UnsupportedModelError("ALiBi: keys must have the model's dtype, kv_cache_dtype='auto'")
    positions = step.positions.bfloat16().long() if rounds_positions else step.positions
    qkv = joined_heads(query, key, value, step.layers[module.layer_idx].head_dim, alibi, positions)
    attended = step.attend(module.layer_idx, qkv.flatten(1), s_aux)
    return attended.view(1, len(qkv), query.shape[1], -1)[..., : value.shape[3]], None


def _twins_of(library: Any) -> dict[str, str]:
    """Return the name of the head's weight, and that of the embedding it is tied to; {}: it is not tied."""
    head, table = library.get_output_embeddings(), library.get_input_embeddings()
    if head.weight is not table.weight:
        return {}
    names = {module: name for name, module in library.named_modules()}
    return {f"{names[head]}.weight": f"{names[table]}.weight"}
