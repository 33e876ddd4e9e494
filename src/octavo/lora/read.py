"""Reads an adapter's files for one rank of a model: checks every tensor, scales, merges and shards like its layers.

Legend: r = rank of the adapter in one layer, V = vocabulary, D = hidden size, P = parts of a merged linear, K = its
inputs and N its outputs on this rank.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from octavo.config.engine import LoadConfig
from octavo.distributed.groups import Share
from octavo.errors import AdapterError
from octavo.kernels.types import PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.layers.moe import LinearElsewhere
from octavo.layers.vocabulary import Embedding, EmbeddingAdapter, LogitsAdapter, LogitsHead
from octavo.loader.registry import get_model_loader
from octavo.loader.safetensors import read_file
from octavo.loader.torch_pt import read_state_dict
from octavo.lora.files import SAFETENSORS_FILE, TensorKind, parse_tensor_name, read_adapter_config, weights_file
from octavo.models.interfaces import CausalLM
from octavo.models.weights import OtherStages, find_part, numbers_in, renamed, spelt_as_in_table

_FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

AdaptedLayer = MergedLinear | Embedding


@dataclass(frozen=True, slots=True)
class Target:
    """A module of the checkpoint in the model: one part of a layer."""

    path: str  # of the layer, within the model
    layer: AdaptedLayer
    part: str  # a key of `MergedLinear.parts`


class AdapterTargets:
    """The modules of one rank that adapters can change, by their names in the checkpoint; `experts`: theirs, too."""

    def __init__(self, model: CausalLM, *, experts: bool = False) -> None:
        self._model, self._elsewhere, self._has_experts = model, OtherStages(model), experts
        self._by_module = dict(_targets(model, model.adapted_layers | (model.adapted_experts if experts else set())))
        self._fused = dict(_fused_modules(model))

    @property
    def layers(self) -> dict[str, AdaptedLayer]:
        """The layers, by their paths in the model."""
        return {target.path: target.layer for target in self._by_module.values() if target is not None}

    def find(self, module: str) -> list[Target]:
        """Return the places of a module; several: their rows are one after the other; []: it is on another rank.

        Raises AdapterError if there is none.
        """
        name = renamed(self._model, module)
        places = [self._find(module, part) for part in self._fused.get(name, (name,))]
        return [place for place in places if place is not None]

    def _find(self, module: str, name: str) -> Target | None:
        if name in self._by_module:
            return self._by_module[name]
        if f"{name}.weight" in self._elsewhere:
            return None
        if not self._has_experts and name in dict(_targets(self._model, self._model.adapted_experts)):
            raise AdapterError(f"{module} is part of an expert: set lora_experts to serve adapters of experts")
        known = ", ".join(sorted({module.rpartition(".")[2] for module in self._by_module}))
        architecture = self._model.config.architecture
        raise AdapterError(f"{module} is no module of {architecture} that adapters can change; known: {known}")


def _targets(model: CausalLM, paths: Set[str]) -> Iterator[tuple[str, Target | None]]:
    """Yield the modules of the layers at these paths; None: a module is on another rank."""
    for template, target in model.weight_names.items():
        path_template, _, part = target.partition(":")
        if path_template not in paths or target in model.parts_on_other_ranks:
            continue
        for numbers in numbers_in(template, model.stage.layers, model.num_experts):
            path = path_template.format(**numbers)
            layer = find_part(model, path)
            if isinstance(layer, LinearElsewhere):
                yield template.format(**numbers), None
            elif isinstance(layer, Embedding) or (isinstance(layer, MergedLinear) and part in layer.parts):
                yield template.format(**numbers), Target(path, layer, part)


def _fused_modules(model: CausalLM) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules whose weights checkpoints have as one, and the table's modules that these consist of."""
    for template, names in model.other_spellings.items():
        if "{expert}" in names[0]:
            continue
        for numbers in numbers_in(template, range(model.config.num_layers), 0):
            modules = (name.format(**numbers).removesuffix(".weight") for name in names)
            yield template.format(**numbers).removesuffix(".weight"), tuple(modules)


class AdapterTensors:
    """An adapter's settings and tensors. Modules have the names of the base model's checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the files in an adapter's folder. Raises CheckpointError, AdapterError."""
        self.config = read_adapter_config(folder)
        path = weights_file(folder)
        self._path = str(path)
        self.by_module: dict[str, dict[TensorKind, torch.Tensor]] = defaultdict(dict)
        self._names: dict[tuple[str, TensorKind], str] = {}
        is_plain = path.name == SAFETENSORS_FILE
        for name, tensor in read_file(path, elsewhere=()) if is_plain else read_state_dict(path).items():
            self._add(name, tensor)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        try:
            module, kind = parse_tensor_name(name)
        except AdapterError as error:
            raise AdapterError(f"{self._path}: {error}") from None
        if kind in self.by_module[module]:
            raise AdapterError(f"{self._path}: tensor {name!r} is given twice")
        if tensor.dtype not in _FLOAT_DTYPES:
            raise AdapterError(f"{self._path}: tensor {name!r}: {tensor.dtype} cannot be an adapter's weights")
        self.by_module[module][kind], self._names[module, kind] = tensor, name

    def has(self, module: str, *kinds: TensorKind) -> bool:
        """Return whether a module has a tensor of any of these kinds."""
        return not self.by_module[module].keys().isdisjoint(kinds)

    def tensor(self, module: str, kind: TensorKind, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a module's tensor. Raises AdapterError if it is missing, of another shape, or not finite."""
        tensor = self.by_module[module].get(kind)
        if tensor is None:
            raise self.error(module, f"{kind} of {list(shape)} that belongs to it is missing")
        if tuple(tensor.shape) != shape:
            raise self.error(module, f"shape {list(shape)} is expected, found {list(tensor.shape)}", kind)
        if not tensor.isfinite().all():
            raise self.error(module, "has values that are not finite, so that its tokens would all be errors", kind)
        return tensor

    def allow(self, module: str, kinds: Set[TensorKind], what: str) -> None:
        """Raise AdapterError unless a module has tensors of these kinds only; `what` it is goes into the message."""
        for kind in self.by_module[module]:
            if kind not in kinds:
                raise self.error(module, f"{kind} does not belong to {what}; known: {', '.join(sorted(kinds))}", kind)

    def error(self, module: str, why: str, kind: TensorKind | None = None) -> AdapterError:
        """Return an error about a module's tensor, by default the first."""
        of_kind = next(iter(self.by_module[module])) if kind is None else kind
        return AdapterError(f"{self._path}: tensor {self._names[module, of_kind]!r}: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """An adapter of one module, as in the file: it adds scale * up @ down @ x to the module's output for x."""

    down: torch.Tensor  # [r, all inputs]
    up: torch.Tensor  # [all outputs, r]
    scale: float

    def scaled_up(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [r, all outputs], with the scale."""
        return (self.up.float() * self.scale).T.to(dtype).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAdapter:
    """An adapter of one layer of a rank. Parts of lower ranks are padded with zeros."""

    down: torch.Tensor  # [P, r, K]
    up: torch.Tensor  # [r, N], scaled

    @classmethod
    def shard(cls, layer: MergedLinear, parts: Mapping[str, LowRank], dtype: torch.dtype) -> Self:
        """Take this rank's shard of the adapters of a layer's `parts`; parts without one stay as they are."""
        rank = max(len(part.down) for part in parts.values())
        outputs = [share.size for share in layer.parts.values()]
        down = torch.zeros(len(outputs), rank, layer.inputs.size, dtype=dtype)
        up = torch.zeros(rank, sum(outputs), dtype=dtype)
        of_outputs = up.split_with_sizes(outputs, dim=1)
        for index, (name, share) in enumerate(layer.parts.items()):
            if (part := parts.get(name)) is not None:
                down[index, : len(part.down)] = part.down[:, layer.inputs.start : layer.inputs.stop]
                of_outputs[index][: len(part.down)] = part.scaled_up(dtype)[:, share.start : share.stop]
        return cls(down=down, up=up)


@dataclass(kw_only=True, slots=True)
class HeadAdapter:
    """An adapter of a logits head; see `LogitsAdapter`. Its weight is packed once, between steps."""

    weight: torch.Tensor | None = None  # [N, K]
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    _packed: PackedLinear | None = None

    def on_device(self, context: BuildContext) -> LogitsAdapter:
        """Return what the layer computes with."""
        if self.weight is not None:
            weight = self.weight.to(context.device)
            self._packed, self.weight = context.kernels.pack_linear(weight, None, "logits"), None
        down, up = (None if tensor is None else tensor.to(context.device) for tensor in (self.down, self.up))
        return LogitsAdapter(weight=self._packed, down=down, up=up)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAdapter:
    """A rank's part of an adapter, on the host, by the layers' paths in the model; other layers are unchanged."""

    layers: Mapping[str, LayerAdapter]
    embeddings: Mapping[str, EmbeddingAdapter]
    heads: Mapping[str, HeadAdapter]

    @property
    def vocabulary_bytes(self) -> int:
        """The size of its changes of embeddings and logits heads."""
        parts = [(each.table, each.down, each.up) for each in self.embeddings.values()]
        parts += [(each.weight, each.down, each.up) for each in self.heads.values()]
        return sum(tensor.nbytes for part in parts for tensor in part if tensor is not None)


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters of ranks up to `max_rank` for the layers of one rank of a model, which compute in `dtype`."""

    model: CausalLM
    targets: AdapterTargets
    load: LoadConfig
    max_rank: int
    dtype: torch.dtype

    def read(self, folder: Path) -> RankAdapter:
        """Read the adapter in a folder.

        Raises CheckpointError: a file is missing, truncated or malformed, or asks for code to be run. AdapterError: an
        adapter of a kind that is not supported, or one that does not fit the model; names the setting or the tensor.
        """
        found = AdapterTensors(folder)
        linears: dict[str, tuple[MergedLinear, dict[str, LowRank]]] = {}  # by path, then part
        embeddings: dict[str, EmbeddingAdapter] = {}
        heads: dict[str, HeadAdapter] = {}
        for module in found.by_module:
            try:
                targets = self.targets.find(module)
            except AdapterError as error:
                raise found.error(module, str(error)) from None
            if not targets:
                continue
            target = targets[0]
            match target.layer:
                case Embedding() as layer:
                    embeddings[target.path] = self._embedding(found, module, layer)
                case LogitsHead() as layer:
                    heads[target.path] = self._head(found, module, layer)
                case layer:
                    what = "a linear layer: only embeddings and logits heads can be replaced (modules_to_save)"
                    found.allow(module, {"down", "up"}, what)
                    _, parts = linears.setdefault(target.path, (layer, {}))
                    parts |= self._low_rank(found, module, layer, [target.part for target in targets])
        return RankAdapter(
            layers={path: LayerAdapter.shard(layer, parts, self.dtype) for path, (layer, parts) in linears.items()},
            embeddings=embeddings,
            heads=heads,
        )

    def _rank(self, found: AdapterTensors, module: str) -> int:
        rank = found.config.rank_of(module)
        if rank > self.max_rank:
            raise found.error(module, f"rank {rank} exceeds max_lora_rank={self.max_rank}")
        return rank

    def _low_rank(
        self, found: AdapterTensors, module: str, layer: MergedLinear, parts: Sequence[str]
    ) -> dict[str, LowRank]:
        """Return the adapters of a layer's parts, which are one module of the checkpoint."""
        rank, outputs = self._rank(found, module), [layer.num_stored_rows(part) for part in parts]
        down = found.tensor(module, "down", (rank, layer.inputs.total))
        rows = found.tensor(module, "up", (sum(outputs), rank)).split_with_sizes(outputs)
        split = [layer.split_rows(part, of) for part, of in zip(parts, rows, strict=True)]
        return {part: self._checked(found, module, down, of) for each in split for part, of in each.items()}

    def _embedding(self, found: AdapterTensors, module: str, layer: Embedding) -> EmbeddingAdapter:
        found.allow(module, {"embedding_down", "embedding_up", "weight", "base_weight"}, "an embedding")
        ids, width, rank = layer.ids, layer.hidden_size, self._rank(found, module)
        table = self._replacement(found, module, ids, width)
        if not found.has(module, "embedding_down", "embedding_up"):
            return EmbeddingAdapter(table=table)
        down = found.tensor(module, "embedding_down", (rank, ids.total))
        low = self._checked(found, module, down, found.tensor(module, "embedding_up", (width, rank)))
        of_ids = low.down[:, ids.start : ids.stop].T.to(self.dtype, copy=True).contiguous()
        return EmbeddingAdapter(table=table, down=of_ids, up=low.scaled_up(self.dtype))

    def _head(self, found: AdapterTensors, module: str, layer: LogitsHead) -> HeadAdapter:
        found.allow(module, {"down", "up", "weight", "base_weight"}, "a logits head")
        outputs = layer.parts[""]
        weight = self._replacement(found, module, outputs, layer.inputs.total)
        if not found.has(module, "down", "up"):
            return HeadAdapter(weight=weight)
        low = self._low_rank(found, module, layer, [""])[""]
        up = low.scaled_up(self.dtype)[:, outputs.start : outputs.stop].contiguous()
        return HeadAdapter(weight=weight, down=low.down.to(self.dtype, copy=True), up=up)

    def _replacement(self, found: AdapterTensors, module: str, rows: Share, width: int) -> torch.Tensor | None:
        """Return this rank's rows of a weight that replaces the base model's; None: there is none."""
        shape = rows.total, width
        if found.has(module, "base_weight"):
            saved = found.tensor(module, "base_weight", shape)
            if not self._is_base(module, saved):
                why = "differs from the base model's: the adapter was trained on another one; merge it with that one"
                raise found.error(module, why, "base_weight")
        if not found.has(module, "weight"):
            return None
        return found.tensor(module, "weight", shape)[rows.start : rows.stop].to(self.dtype, copy=True)

    def _is_base(self, module: str, saved: torch.Tensor) -> bool:
        """Read the checkpoint once more: does its embedding or logits head equal `saved` in the model's dtype?"""
        model = self.model
        names = {f"{renamed(model, module)}.weight"}
        if model.config.tie_word_embeddings:
            names |= {f"{name}.weight" for name, of in model.weight_names.items() if of in ("embedding", "logits_head")}
        dtype = model.context.dtype
        for name, tensor in spelt_as_in_table(model, get_model_loader(self.load).tensors(model)):
            if name in names:
                return tensor.shape == saved.shape and torch.equal(tensor.to(dtype), saved.to(dtype))
        return False

    def _checked(self, found: AdapterTensors, module: str, down: torch.Tensor, up: torch.Tensor) -> LowRank:
        """Check that what was finite in the file still is in the model's dtype."""
        low = LowRank(down=down, up=up, scale=found.config.scale_of(module))
        if not (low.down.to(self.dtype).isfinite().all() and low.scaled_up(self.dtype).isfinite().all()):
            raise found.error(module, f"its values exceed the range of {self.dtype}")
        return low
